"""
What every script shares: errors, flags, run folders and the labbook, tokens and task files, packing and the chunked
head, number rewards, pass@k and statistics. The method (loss, weights of the tokens, what is rewarded) is not here: it
stands in the training scripts.

Names, used everywhere: N prompts a step, G samples a prompt, B = N * G rows, T tokens, V vocabulary, C hidden size.
ids (B, T); mask (B, T), True where the policy sampled the token; logp[:, t] scores ids[:, t + 1].
"""
import argparse
import csv
import errno
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
import zlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent


# ----------------------------------------------------------------------------------------------------------------------
# Errors: one line that says what was wrong and what to do

class UserError(Exception):
    """The user can mend it (a flag, a file, a model): one line on stderr, exit code 2."""


class RunError(Exception):
    """The run cannot go on (a loss that is not finite, a dead server): one line on stderr, exit code 1."""


def disk_is_full(error):
    """Also where a library that writes tensors raised an error of its own on the way."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_advice(run, args):
    """One line for a full disk: free, total, and the flag with a value that needs less."""
    text = "the disk is full, or a limit on files is reached; what was written before is whole"
    args = run.args if run else args
    where = next(f for f in (getattr(run, "folder", None), ROOT) if f and Path(f).exists())
    try:
        space = shutil.disk_usage(where)
    except OSError:
        return text
    text += f"; {space.free / GIB:.2f} of {space.total / GIB:.2f} GiB are free at {where}: make room"
    keep = getattr(args, "keep", 1)
    if keep > 1:
        text += f", lower --keep {keep} to 1"
    return text + (", or write elsewhere with --output-dir"
                   if hasattr(args, "output_dir") and not getattr(args, "resume", None) else "")


def one_line(text):
    """Control characters and line ends as Python writes them."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda m: repr(m[0])[1:-1], text)


def ignore_signals():
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def leave_terminal():
    """After it has gone: what still goes to it, or to a pipe of it, goes nowhere; files get what is said as before."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        try:
            kept = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:
            kept = False
        if not kept:
            setattr(sys, name, open(os.devnull, "w"))


def fail_in_one_line(run=None, args=None):
    """
    Every exception that reaches the top ends in one line and an exit code; a run's record is written first. args: the
    flags of a script without a run, for the advice where memory is short.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")   # None where the caller closed it

    def hook(kind, error, trace):
        ignore_signals()   # one more Ctrl-C would leave the run without its record
        if run is None and issubclass(kind, BrokenPipeError):   # `| head` has seen enough
            os._exit(141)
        if issubclass(kind, UserError):
            text, code = one_line(str(error)), 2
        elif issubclass(kind, KeyboardInterrupt):
            text, code = "interrupted", 130
        elif disk_is_full(error):
            text, code = disk_advice(run, args), 1
        elif out_of_memory(error):
            text, code = memory_advice(error, trace, run, args), 1
        elif issubclass(kind, (RunError, OSError)):
            text, code = " ".join(str(error).split()), 1
        elif run is None:
            traceback.print_exception(kind, error, trace)   # a bug: show all of it
            os._exit(1)
        else:
            text, code = f"{kind.__name__}: {' '.join(str(error).split())}", 1
        if run is not None:
            try:
                text += run.fail(text, "".join(traceback.format_exception(kind, error, trace)))
            except (OSError, UserError) as e:   # the disk that is full holds the records too
                text += f" (and the end of the run could not be recorded: {e})"
        sys.stdout.flush()
        print(f"{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr, flush=True)
        os._exit(code)
    sys.excepthook = hook


# ----------------------------------------------------------------------------------------------------------------------
# Flags

class Parser(argparse.ArgumentParser):
    """Flags are never abbreviated, and an error is one line."""

    def __init__(self, **more):
        super().__init__(allow_abbrev=False, **more)

    def parse_known_args(self, args=None, namespace=None):   # parse_args calls it
        for i, word in enumerate(sys.argv[1:] if args is None else args, 1):
            if any("\udc80" <= c <= "\udcff" for c in word):   # bytes that are no text: no record could hold them
                self.error(f"argument {i} is not UTF-8 text")   # not its value, which may be a key
        return super().parse_known_args(args, namespace)

    def error(self, message):
        print(f"{self.prog}: error: {one_line(message)} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)


def number(kind=float, low=None, high=None, above=None, below=None):
    """An argparse type: a finite number of `kind` in [low, high], or strictly `above` and `below`."""
    parts = [f">= {low}" if low is not None else "", f"<= {high}" if high is not None else "",
             f"> {above}" if above is not None else "", f"< {below}" if below is not None else ""]
    name = " and ".join(p for p in parts if p) or "any"

    def parse(text):
        try:
            x = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {'a whole number' if kind is int else 'a number'} ({name})") from None
        if (kind is float and not math.isfinite(x)) or (low is not None and x < low) or (
                high is not None and x > high) or (above is not None and x <= above) or (
                below is not None and x >= below):
            raise argparse.ArgumentTypeError(f"{text} is out of range ({name})")
        if kind is int and abs(x) >= 2 ** 63:   # no size of a tensor, and from 400 digits on no float either
            raise argparse.ArgumentTypeError(f"{text[:24]}{'...' * (len(text) > 24)} is out of range (below 2^63)")
        return x
    return parse


def add_run_flags(parser, task=True, pool=False):
    """
    The plumbing that is the same in every training script: model and task (pretrain.py has none), records; with `pool`
    what only a script reads that samples its own training data.
    """
    if task:
        add_task_flags(parser.add_argument_group("model and task"))
    if pool:
        add_pool_flags(parser.add_argument_group("pool and evaluation"))
    g = parser.add_argument_group("records and device")
    g.add_argument("--seed", type=number(int, 0, 2 ** 63 - 1), default=0,
                   help="seed of training: order of problems and samples")
    g.add_argument("--output-dir", default=None, help="run folder (default: a fresh one under runs/)")
    g.add_argument("--labbook", default="labbook.md", help="file that gets this run's records")
    g.add_argument("--curves", default=None, help="also write the curves as CSV to this file")
    g.add_argument("--resume", default=None, metavar="RUN", help="go on with this run folder from its last checkpoint")
    g.add_argument("--save-every", type=number(int, 0), default=25, help="steps between checkpoints (0: last only)")
    g.add_argument("--keep", type=number(int, 1), default=1, help="checkpoints kept, the last ones")
    g.add_argument("--notes", default="", help="free text for the record")
    g.add_argument("--predict", nargs="+", default=[], metavar="'KEY OP NUMBER'",
                   help="what is expected of this run, like 'heldout-same.pass@1 >= 0.6', recorded before it starts")
    g.add_argument("--price-per-hour", type=number(float, 0), default=None, help="price of the machine, any currency")
    g.add_argument("--wandb", action=argparse.BooleanOptionalAction, default=False, help="log to Weights & Biases too")
    g.add_argument("--device", default="auto", help="cuda, mps, cpu, or auto: the first that is there")
    g.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"],
                   help="dtype of the products (auto: bf16 on cuda, fp32 elsewhere)")


def add_task_flags(g):
    g.add_argument("--model", default="data/tiny", help="folder in Hugging Face format, or a hub id like org/name")
    g.add_argument("--adapter", default=None, metavar="PATH",
                   help="adapter on top of the model: a run folder, or a folder as peft writes it")
    g.add_argument("--lora-rank", type=number(int, 0), default=None,
                   help="train an adapter of this rank, columns of B (default: that of --adapter, else all weights; "
                   "0: all weights)")
    g.add_argument("--lora-alpha", type=number(float, above=0), default=None,
                   help="scale of a new adapter times its rank (default: 2 times the rank)")
    g.add_argument("--lora-targets", nargs="+", default=None, metavar="LAYER",
                   help="layers of a new adapter, such as q_proj v_proj (default: every linear layer but the head)")
    g.add_argument("--task", default="arithmetic", help="task to train and evaluate on (see envs.py)")
    g.add_argument("--tasks-dir", default=None, help="folder of the task files (default: data/TASK)")
    g.add_argument("--template", default=None, help="file with a chat template in jinja (default: the tokenizer's)")
    g.add_argument("--limit", type=number(int, 1), default=60, help="problems of each evaluated split, first ones")
    g.add_argument("--eval-every", type=number(int, 0), default=0, help="steps between evaluations (0: first and last)")
    g.add_argument("--eval-n", type=number(int, 0), default=32, help="samples a problem in evaluations (0: none)")
    g.add_argument("--eval-seed", type=number(int, 0, 2 ** 63 - 1), default=0, help="seed of the evaluations' samples")


def add_pool_flags(g):
    g.add_argument("--pool", default=None, metavar="FILE", help="train on a screened pool (eval_passk.py --pool-out)")
    g.add_argument("--any-pool", action=argparse.BooleanOptionalAction, default=False,
                   help="take a pool that was screened with another model, or edited")
    g.add_argument("--eval-other", default=None, metavar="TASK", help="another task that is evaluated too")
    g.add_argument("--limit-other", type=number(int, 1), default=None, help="its problems (default: as --limit)")
    g.add_argument("--eval-n-other", type=number(int, 1), default=None,
                   help="samples a problem out of domain: all but the first held-out split (default: as --eval-n)")
    g.add_argument("--eval-kl", action=argparse.BooleanOptionalAction, default=False,
                   help="evaluations measure the KL to the start of the run, in nats a token")


OLD_NAMES = {"--batch-size": "--prompts-per-step (problems a step) and --num-generations (answers a problem)",
             "--grad-accum": "--micro-batch-tokens (the memory of a backward pass; the gradient does not depend on it)",
             "--data-dir": "--tasks-dir", "--learning-rate": "--lr", "--max-completion-length": "--max-new",
             "vllm-colocate": "leave --rollouts out, samples are drawn in this process and on the device that trains"}
MAY_CHANGE = ("resume", "max_steps", "device", "keep")   # what a resumed run may be given anew


def parse_args(parser, argv=None, presets=None):
    """
    Parses argv. A preset and the config of a resumed run set defaults only: what is typed wins, but a typed flag that
    contradicts the resumed run is refused by name. Old names of the documents end in the error that names ours.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for word in argv:
        if word.split("=")[0] in OLD_NAMES:
            parser.error(f"{word.split('=')[0]} has another name here: {OLD_NAMES[word.split('=')[0]]}")
    first = Parser(add_help=False)
    first.add_argument("--preset")
    first.add_argument("--resume")
    early, _ = first.parse_known_args(argv)
    if presets is not None and early.preset == "help":
        for name, values in presets.items():
            flags = {f"--{'no-' * (v is False)}{k.replace('_', '-')}": v for k, v in values.items()}
            print(name, " ".join(k if isinstance(v, bool) else f"{k} {v}" for k, v in flags.items()))   # as typed
        sys.exit(0)
    if presets and early.preset in presets:
        if odd := [k for k in presets[early.preset] if all(k != a.dest for a in parser._actions)]:
            parser.error(f"--preset {early.preset}: it sets {odd[0]}, which is no flag of this script")
        parser.set_defaults(**presets[early.preset])
    known = vars(parser.parse_args([])) if early.resume else {}
    if early.resume:
        try:
            config = json.loads((Path(early.resume) / "config.json").read_text(encoding="utf-8"))["args"]
            odd = next((k for k in config if k not in known), None)
            known = {k: v for k, v in config.items() if k in known}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            parser.error(f"--resume {early.resume}: no run folder with a config.json ({type(e).__name__}: {e})")
        copies = [p.name for p in Path(early.resume).glob("*.py")]   # the run's own copy of its script
        if copies and Path(sys.argv[0]).name not in copies:
            parser.error(f"--resume {early.resume}: it is a run of another script, {copies[0]}")
        if odd:
            parser.error(f"--resume {early.resume}: its {odd} is no flag of this script: another version began the run")
        parser.set_defaults(**known)
    for action in parser._actions:
        if action.choices and known.get(action.dest) not in (None, *action.choices):
            parser.error(f"--resume {early.resume}: its --{action.dest} {known[action.dest]} is unknown here: "
                         f"it is a run of another script")
    args = parser.parse_args(argv)
    for key in ("resume", "pool", "model", "adapter", "labbook", "output_dir", "tasks_dir", "template", "curves",
                "data", "valid"):
        if getattr(args, key, None) == "":   # a shell variable that was not set, most likely
            parser.error(f"--{key.replace('_', '-')} is empty")
    has = vars(args)
    for flag, reader, needs in [("any_pool", "pool", "--pool"), ("limit_other", "eval_other", "--eval-other"),
                                ("eval_n_other", "eval_n", "--eval-n above 0"),
                                ("eval_every", "eval_n", "--eval-n above 0"),
                                ("eval_kl", "eval_n", "--eval-n above 0")]:
        if flag in has and reader in has:
            refuse_unread(parser, args, (flag, has[reader], needs))
    if "lora_rank" in has:
        check_lora_flags(parser, args)
    for key, value in known.items():
        if key not in MAY_CHANGE and getattr(args, key) != value:
            parser.error(f"--{key.replace('_', '-')} {getattr(args, key)} differs from the resumed run's {value}; "
                         f"only --max-steps, --device and --keep may change")
    return args


def refuse_unread(parser, args, *rules):
    """rules: (flag, whether it is read, what makes it read). A flag that was set and is not read is an error."""
    for flag, read, needs in rules:
        if not read and getattr(args, flag) != parser.get_default(flag):
            parser.error(f"--{flag.replace('_', '-')} is read only with {needs}")


def check_lora_flags(parser, args):
    refuse_unread(parser, args, ("lora_alpha", args.lora_rank or args.adapter, "--lora-rank above 0"),
                  ("lora_targets", args.lora_rank or args.adapter, "--lora-rank above 0"))
    if args.adapter and args.lora_rank == 0:
        parser.error("--lora-rank 0 trains all weights, and --adapter goes on with an adapter; to train all weights "
                     "from there, merge it first (merge_and_unload of the package peft) and give that as --model")
    if (args.adapter or args.lora_rank) and args.optim == "adamw-sr":
        parser.error("--optim adamw-sr is for bf16 weights, and those of an adapter are fp32; leave --optim out")


def check_lr(parser, args, usual):
    """Refuses a run without a learning rate, but for all weights of data/tiny. usual: for all weights of others."""
    more = " or --preset" if hasattr(args, "preset") else ""
    if args.lr is None and (args.adapter or args.lora_rank):
        parser.error(f"--lr has no default for an adapter; give --lr (1e-5 to 1e-4 is usual for a 0.5B to 2B model, "
                     f"1e-3 for data/tiny){more}")
    if args.lr is None and not is_tiny(args.model):
        parser.error(f"--lr has a default for data/tiny only; for {args.model} give --lr ({usual} is usual for all "
                     f"weights of a 0.1B to 2B model){more}")


def is_tiny(model):
    """Whether --model means the embedded base, however its path is written."""
    return model.rstrip("/") == "data/tiny" or Path(model).resolve() == ROOT / "data" / "tiny"


def pick_device(name):
    """'auto' or a torch device name -> torch.device. A device that is not there is a UserError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name}: not available here ({str(e).splitlines()[0]})") from e
    return torch.device(name)


def pick_precision(name, device):
    """-> torch dtype of the products."""
    return torch.bfloat16 if name == "bf16" or (name == "auto" and device.type == "cuda") else torch.float32


def lr_at(step, steps, lr, warmup, schedule):
    """Learning rate at step 0 .. steps - 1: linear warm-up, then constant, or linear or cosine down to 0."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    done = (step - warmup) / max(1, steps - warmup)
    return lr * (1 - done) if schedule == "linear" else lr * 0.5 * (1 + math.cos(math.pi * done))


def due(done, every, stride=1):
    """Whether a thing done every `every` steps (0: never) falls on the `stride` steps that end with `done`."""
    return every > 0 and done % every < stride


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers. A bf16 number near 0.02 has neighbours 1e-4 away: plain bf16 weights lose nearly every step of size 1e-6.

#         --optim       what the run line says, and the bytes a weight of gradient and moments
OPTIMS = {"adamw": ("AdamW on fp32 weights", 4 + 8),
          "adamw-sr": ("AdamW on bf16 weights, weights and moments rounded stochastically", 2 + 4),
          "adamw8bit": ("AdamW on fp32 weights, 8-bit moments", 4 + 2)}


def weight_dtype(optim):
    """The dtype in which --optim keeps the weights that it updates."""
    return torch.bfloat16 if optim == "adamw-sr" else torch.float32


def make_optimizer(model, lr, weight_decay=0.0, optim="adamw", seed=0):
    """One of OPTIMS over the trained weights; betas as usual for policy gradients. seed: of the rounding."""
    more = {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no weight of the model is trained")
    if optim == "adamw-sr":
        return StochasticAdamW(trained, seed=seed, **more)
    if optim == "adamw8bit":
        try:
            import bitsandbytes
        except ImportError as e:
            raise UserError("--optim adamw8bit: the package bitsandbytes is not installed (pip install bitsandbytes); "
                            "--optim adamw-sr needs no package, and 8 bytes a weight in place of 10") from e
        return bitsandbytes.optim.AdamW8bit(trained, **more)
    return torch.optim.AdamW(trained, fused=model.device.type == "cuda", **more)


def round_stochastically(x, out, generator):
    """x fp32 -> out bf16: one of its two neighbours, with probabilities that make x the expected value."""
    bits = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    # bf16 is the upper half of fp32: a carry out of the lower half moves the magnitude one place up
    out.copy_(bits.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32))


class StochasticAdamW(torch.optim.Optimizer):
    """
    AdamW (arXiv 1711.05101, algorithm 2) on bf16 weights with bf16 moments: 8 bytes a weight with its gradient, in
    place of 16. Computed in fp32; what is stored is rounded stochastically, by a generator that is seeded anew from
    (seed, step), so that a resumed run goes on with the same weights.
    """
    PIECE = 2 ** 24   # weights at a time: bounds the fp32 temporaries

    def __init__(self, params, lr, betas, weight_decay=0.0, eps=1e-8, seed=0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "seed": seed,
                                  "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr, eps = group["betas"], group["lr"], group["eps"]
            group["step"] += 1
            mean, square = 1 - b1 ** group["step"], 1 - b2 ** group["step"]   # what the start from 0 took away
            generator = torch.Generator(group["params"][0].device)
            generator.manual_seed((group["seed"] * 0x9E3779B97F4A7C15 + group["step"]) % 2 ** 63)
            for p in (p for p in group["params"] if p.grad is not None):
                if p not in self.state:
                    self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                flat = [x.view(-1).split(self.PIECE) for x in (p, self.state[p]["m"], self.state[p]["v"])]
                for w, m, v, g in zip(*flat, p.grad.reshape(-1).split(self.PIECE)):
                    g = g.float()
                    m32 = m.float().lerp_(g, 1 - b1)
                    v32 = v.float().mul_(b2).addcmul_(g, g, value=1 - b2)
                    w32 = w.float().mul_(1 - lr * group["weight_decay"])
                    w32.addcdiv_(m32, (v32 / square).sqrt_().add_(eps), value=-lr / mean)
                    for x, out in ((m32, m), (v32, v), (w32, w)):
                        round_stochastically(x, out, generator)


# ----------------------------------------------------------------------------------------------------------------------
# Room: disk and memory against what a run will need, before it starts; and what to say when it runs out all the same

GIB = 2 ** 30


def memory_free(device):
    """(free, total) bytes on the device; (None, None) where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return tuple(int(lines[k].split()[0]) * 1024 for k in ("MemAvailable", "MemTotal"))
    except OSError:
        return None, None


def layer_bytes(model):
    """
    Bytes that one layer keeps of one token for the backward pass: two fp32 residuals with their norms, and in the dtype
    of the products the inputs of q, k, v, attention and output, and four widths of the SwiGLU. Through fused.py: two
    fp32 residuals, the inputs of the qkv and the gate/up product, q, k, v (before the head norms too, if there are
    any), attention's output and log-sums, and three widths of the SwiGLU.
    """
    c, size = model.config, 4 if model.compute_dtype == torch.float32 else 2
    if model.kernels():
        heads, kv = c.num_attention_heads, c.num_key_value_heads
        return (12 * c.hidden_size + 2 * c.head_dim * (2 * heads + 2 * kv + c.qk_norm * (heads + kv)) + 4 * heads
                + 6 * c.intermediate_size)
    return 16 * c.hidden_size + size * (7 * c.hidden_size + 4 * c.intermediate_size)


def check_room(run, model, row_tokens, rows_a_step, slots=0):
    """
    Refuses a run that cannot fit (UserError with the need, what is free, the flag and a value that fits). The model and
    a frozen copy are in memory already; still to come are gradients and moments (OPTIMS), the sampler's copy of the
    weights where theirs is another dtype, its cache, and what the layers keep for the backward pass (layer_bytes).
    Where that does not fit, layers are recomputed in the backward pass, which keeps 4 C bytes a token and layer. With
    an adapter, gradients and moments are its own, the frozen matrices are in the dtype of the products, and the sampler
    has a merged copy of those that the adapter changes.
    """
    c, half = model.config, model.compute_dtype != torch.float32
    params, trained, micro = model.num_params(), model.num_trained(), run.args.micro_batch_tokens
    own = next(model.parameters()).dtype == model.compute_dtype   # the products read the weights themselves
    layer, size = layer_bytes(model), 2 if half else 4
    a_token = c.num_hidden_layers * layer
    cache = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size * slots * row_tokens
    logits = 3 * 4 * c.vocab_size * chunk_rows(c.vocab_size, model.device)
    state = OPTIMS[getattr(run.args, "optim", "adamw")][1]
    # the copy is there twice: the sampler's, and the one that the products of the trainer keep for the backward pass
    sampler = kept = 0 if own else size * (params if model.adapter is None else model.head_weight.numel())
    sampler += size * sum(m.weight.numel() for m in model.modules() if getattr(m, "lora_A", None) is not None)
    fixed = trained * state + kept + sampler * bool(slots) + cache + logits
    passing = 0
    if model.kernels():   # the gate/up product's fp32 sums, of one layer at a time; a head in fp16 and another in bf16
        passing = 8 * c.intermediate_size
        fixed += (not own) * 2 * c.vocab_size * c.hidden_size
    a_token += passing
    tokens = max(row_tokens, min(micro, row_tokens * rows_a_step))
    free, total = memory_free(model.device)
    if free is not None and fixed + tokens * a_token > free:
        model.checkpointing = True
        a_token = c.num_hidden_layers * 4 * c.hidden_size + layer + passing
        fixed -= kept
        text = (f"layers are recomputed in the backward pass: {tokens} tokens keep {tokens * a_token / GIB:.1f} GiB in "
                f"place of {tokens * c.num_hidden_layers * layer / GIB:.1f}")
        run.note(text)
    run.room = {"fixed": fixed, "a_token": a_token, "a_slot": cache / slots if slots else 0, "slots": slots,
                "free": free}
    if free is not None and fixed + tokens * a_token > free:
        fits = int((free - fixed) / a_token)
        slots_fit = int((free - fixed + cache - row_tokens * a_token) / cache * slots) if cache else 0
        if fits >= row_tokens:
            mend = f"--micro-batch-tokens {micro} is too much, {fits} would fit"
        elif slots_fit > 0:   # beside the least that a backward pass can be
            mend = f"--slots {slots} is too much, {slots_fit} would fit with --micro-batch-tokens {row_tokens}"
        else:
            mend = f"even one row of {row_tokens} tokens does not fit: take a smaller model or shorter rows (--max-new)"
        raise UserError(f"memory: the run needs about {(fixed + tokens * a_token) / GIB:.1f} GiB more on "
                        f"{model.device}; {free / GIB:.1f} of {total / GIB:.1f} GiB are free; {mend}")
    folder = next(p for p in [run.folder, *run.folder.resolve().parents] if p.exists())
    a_checkpoint, others = trained * 12, 20 * row_tokens * rows_a_step * (run.args.max_steps or 0)   # samples.jsonl
    others += 2 * 4 * trained * bool(getattr(run.args, "valid", None))   # best/, and its successor beside it
    standing = len([f for f in run.folder.glob("checkpoint-*") if f.suffix != ".tmp"])   # of a resumed run
    more = max(0, run.args.keep + 1 - standing)   # one more stands while it is written
    need, (total, _, free) = more * a_checkpoint + others, shutil.disk_usage(folder)
    if need > free:
        fits = int((free - others) / a_checkpoint) - 1 + standing
        mend = [f"lower --keep {run.args.keep} to {fits}"] if 0 < fits < run.args.keep else []
        mend += [] if getattr(run.args, "resume", None) else ["write elsewhere with --output-dir"]
        raise UserError(f"disk: checkpoints and samples need about {need / GIB:.2f} GiB more; {free / GIB:.2f} of "
                        f"{total / GIB:.2f} GiB are free at {folder}; {', or '.join(mend) or 'make room'}")


def out_of_memory(error):
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def memory_advice(error, trace, run, args=None):
    """
    One line for a memory error: asked, in use, total, the flag to lower and a value that would fit, by check_room's
    prediction and a tenth less than was free then, since the allocator cannot fill every gap.
    """
    asked = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
    device = getattr(run, "device", None) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (free, total), args, room = memory_free(device), getattr(run, "args", args), getattr(run, "room", None)
    text = f"out of memory: asked for {asked[1] if asked else 'more'}"
    text += "" if free is None else f", {(total - free) / GIB:.1f} GiB in use of {total / GIB:.1f}"
    sampling = any("engine" in Path(f.filename).name for f in traceback.extract_tb(trace))
    flag = next((f for f in (["slots"] if sampling else []) + ["micro_batch_tokens"] if hasattr(args, f)), None)
    if flag is None:
        return text
    asked_for = getattr(args, flag)
    text += f"; lower --{flag.replace('_', '-')} {asked_for}"
    if room is None or room["free"] is None or flag == "slots" and not room["slots"]:
        return f"{text} ({max(1, asked_for // 2)} halves what it takes)"
    left = 0.9 * room["free"] - room["fixed"]
    if flag == "slots":   # the cache is part of what is fixed; while it is filled, no layer keeps anything
        fits = int(left / room["a_slot"] + room["slots"])
    else:
        fits = int(left / room["a_token"])
    fits = min(asked_for // 2, fits)   # the prediction was too low once
    return f"{text} ({fits} would fit)" if fits > 0 else f"{text}, or take a smaller model: not even 1 is sure to fit"


# ----------------------------------------------------------------------------------------------------------------------
# The labbook: Markdown in which every line that begins with { is one record, chained by the hash of the one before

LABBOOK_HEAD = """# Lab book

One line of prose and one JSON line a record; `prev` is the hash of the record before. Appended by the scripts, never
edited.
"""


def record_hash(line):
    return hashlib.sha256(line.strip().encode()).hexdigest()[:16]


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def append_record(path, record, prose):
    """
    Appends one record under a lock and flushes it to disk, whole or not at all; returns the record with its `prev`. A
    torn last record, which a process killed while it wrote can leave, was never one and is cut off first; a person's
    last line stays.
    """
    try:
        with open(path, "a+b", buffering=0) as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            f.seek(0)
            text = f.read()
            whole, tail = text[:text.rfind(b"\n") + 1], text[text.rfind(b"\n") + 1:]
            if tail.startswith(b"{") and not is_json(tail):
                f.truncate(len(whole))
            elif tail:
                f.write(b"\n")
                whole = text + b"\n"
            if not whole:
                f.write(LABBOOK_HEAD.encode())
            # split at \n alone here and below: a JSON string may hold U+2028 and others that splitlines() cuts at
            last = [line for line in whole.decode(errors="replace").split("\n") if line.startswith("{")][-1:]
            record = {"kind": record["kind"], "prev": record_hash(last[0]) if last else "", **record}
            line = json.dumps(record, ensure_ascii=False, allow_nan=False)
            text, size = f"\n{' '.join(prose.split())}\n{line}\n".encode(), os.fstat(f.fileno()).st_size
            try:
                while text:
                    text = text[f.write(text):]
                os.fsync(f.fileno())
            except OSError:   # a full disk: no half of a record stays
                f.truncate(size)
                raise
    except OSError as e:
        raise UserError(f"--labbook {path}: cannot be written ({e.strerror})") from e
    return record


def check_writable(path):
    """Refuses a labbook that cannot be written, without making the file: a command may be refused yet."""
    path = Path(path)
    if not path.resolve().parent.is_dir() or path.exists() and not path.is_file():
        raise UserError(f"--labbook {path}: cannot be written ("
                        f"{'it is no plain file' if path.exists() else f'there is no folder {path.parent}'})")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--labbook {path}: cannot be written (no permission)")


FIELDS = {"kind": str, "run_id": str, "time": str, "text": str, "notes": str, "status": str, "scores": dict,
          "losses": dict, "config": dict, "budget": dict, "model": dict, "data": list}


def odd_field(record):
    """The first field of a record that has another type than ours have, or that its kind needs; else None."""
    needs = {"margin": ("time", "text"), "prediction": ("text",)}.get(record.get("kind"), ())
    return next((k for k, t in FIELDS.items() if not isinstance(record.get(k), (t, type(None)))
                 or k in needs and record.get(k) is None
                 or k == "data" and not all(isinstance(d, dict) for d in record.get(k) or [])), None)


def read_labbook(path):
    """
    -> (records, problems): the records in order, and one sentence for each line that breaks the chain or JSON, or has a
    field of another type (which is left out).
    """
    records, problems, prev = [], [], ""
    for i, line in enumerate(plain_file(path).read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not line.startswith("{"):
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as e:
            problems.append(f"{path}:{i}: not a whole record ({e})")
            prev = record_hash(line)
            continue
        if record.get("prev") != prev:
            problems.append(f"{path}:{i}: `prev` is {record.get('prev')}, the record before has {prev or 'no hash'}: "
                            f"edited, removed, or the seam of a merge")
        prev = record_hash(line)
        if odd := odd_field(record):
            problems.append(f"{path}:{i}: left out, its {odd} is {repr(record.get(odd))[:40]}")
        else:
            records.append(record)
    return records, problems


def short_path(path):
    """A path as records name it: below the project from there, so that it is the same on every machine."""
    return os.path.relpath(path, ROOT) if Path(path).resolve().is_relative_to(ROOT) else str(path)


def sha256_file(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            h.update(block)
    return h.hexdigest()


def sha256_model(folder, adapter=None):
    """One hash over the weight files of a folder, in the order of their names, and those of an adapter's folder."""
    hashes = [sha256_file(f) for place in (folder, adapter) if place for f in sorted(Path(place).glob("*.safetensors"))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def model_record(args, folder, adapter=None):
    """What records say of the model. folder: of --model; adapter: folder of --adapter, or None. sha256: of both."""
    record = {"name": args.model, "sha256": sha256_model(folder, adapter)}
    return record if adapter is None else {
        **record, "base_sha256": sha256_model(folder),
        "adapter": {"name": args.adapter, "sha256": sha256_model(adapter)}}


def parent_run(folder, adapter=None):
    """The run_id of the run whose folder, checkpoint or best the adapter is, or else the model; None: of no run."""
    for place in (adapter, folder):
        for path in (Path(place).absolute(), Path(place).absolute().parent) if place else ():
            try:
                if "script_sha256" in json.loads((path / "config.json").read_text(encoding="utf-8")):
                    return path.name
            except (OSError, ValueError, TypeError):
                continue
    return None


def peak_mem_gib(device):
    return round(torch.cuda.max_memory_allocated() / GIB, 3) if device.type == "cuda" else None


def sha256_settings(folder, adapter=None, template=None):
    """One hash over what decides on prompts and shapes beside the weights: config, tokenizer, chat template."""
    names = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*",
             "adapter_config.json")
    files = [f for place in (folder, adapter) if place for name in names for f in sorted(Path(place).glob(name))]
    files += [Path(template)] if template else []
    return hashlib.sha256("".join(sha256_file(f) for f in files if f.is_file()).encode()).hexdigest()


def git_state():
    """
    -> {"commit", "dirty"}; dirty ignores labbook.md and runs/, which every run changes. Where the code was copied to a
    machine without its history, the environment variable NANOPOST_COMMIT names the commit.
    """
    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)
    try:
        commit = git("rev-parse", "HEAD")
        if commit.returncode:
            return {"commit": os.environ.get("NANOPOST_COMMIT"), "dirty": None}
        dirty = git("status", "--porcelain", "--", ".", ":!labbook.md", ":!runs")
        return {"commit": commit.stdout.strip()[:12], "dirty": bool(dirty.stdout.strip())}
    except (OSError, subprocess.TimeoutExpired):
        return {"commit": None, "dirty": None}


def versions():
    import transformers
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "numpy": np.__version__}


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.machine()}, {torch.get_num_threads()} threads"


# ----------------------------------------------------------------------------------------------------------------------
# Predictions: what is expected of a run, written down before it; report.py reconciles them afterwards

PREDICTED = re.compile(r"""
    (?P<key> [\w-]+\.(?:(?:lenient_)?pass@\d+ | gain(?:@\d+)? | (?:lenient_)?greedy | mean_length | truncated | entropy
                        | parsable)                                                      # heldout-same.pass@1
      | losses\.\w+ | wall_s | peak_mem_gib | peak_rss_gib | cost | prompts | rollouts | tokens_sampled
      | tokens_trained )
    \s* (?P<op>>=|<=|>|<|=) \s* (?P<value>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    (?: \s*(?:\+-|±)\s* (?P<within>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?) )?""", re.VERBOSE)


def parse_prediction(text):
    """'heldout-same.pass@1 >= 0.60', 'wall_s = 300 +- 30' -> {"text", "key", "op", "value", "within"}, or UserError."""
    m = PREDICTED.fullmatch(text.strip())
    if not m or (m["op"] == "=") != (m["within"] is not None):
        raise UserError(f"--predict {text!r}: expected KEY OP NUMBER, OP one of > >= < <=, or KEY = NUMBER +- NUMBER; "
                        f"KEY is SPLIT.pass@1, SPLIT.gain, SPLIT.greedy, SPLIT.mean_length, SPLIT.truncated, "
                        f"SPLIT.entropy, losses.NAME, wall_s, peak_mem_gib, tokens_sampled, tokens_trained or cost")
    return {"text": text.strip(), "key": m["key"], "op": m["op"], "value": float(m["value"]),
            "within": None if m["within"] is None else float(m["within"])}


def record_prediction(path, run_id, text):
    """Appends a prediction about the run `run_id` to the labbook; call it before the run's start record."""
    return append_record(path, {"kind": "prediction", "run_id": run_id, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                                **parse_prediction(text)},
                         f"- {time.strftime('%Y-%m-%d %H:%M')} prediction for {run_id}: {text}")


# ----------------------------------------------------------------------------------------------------------------------
# A run: its folder, its records, its end

STEP_FILES = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_samples.jsonl")   # a row of each has its step


class Run:
    """
    One run folder. `start` writes the start record; every way out writes the one `run` record: finish, a failure
    (through the excepthook), or a stop by SIGINT, SIGTERM or SIGHUP, which sets `stopped` for the loop to see.
    """

    def __init__(self, args, arm):
        self.args, self.arm, self.started, self.ended, self.stopped = args, arm, False, False, None
        self.script = Path(sys.argv[0]).stem
        self.t0, self.wall_before = time.monotonic(), 0.0   # the clock of the day may be set back
        self.budget = {"prompts": 0, "rollouts": 0, "tokens_sampled": 0, "tokens_trained": 0}
        self.scores, self.losses, self.last, self.remark = {}, {}, {}, ""
        self.seen = set()   # the steps whose evaluation is in eval.jsonl
        fail_in_one_line(self)
        if args.resume:
            self.folder = Path(args.resume).resolve()   # --resume . has a name too
            self.hold()
        elif args.output_dir:
            self.folder = Path(args.output_dir)
            try:
                if self.folder.exists():
                    raise UserError(f"--output-dir {self.folder} exists; take another, or --resume {self.folder}")
            except OSError as e:   # a name that is too long
                raise UserError(f"--output-dir {str(self.folder)[:80]}: {e.strerror}") from e
        else:
            stamp = time.strftime("%y%m%d-%H%M%S")
            name = f"{self.script}-{arm}-{getattr(args, 'task', 'text')}-s{args.seed}-{stamp}"
            self.folder = ROOT / "runs" / name
        check_writable(args.labbook)
        for text in args.predict:
            parse_prediction(text)
        if args.curves and (Path(args.curves).is_dir() or not Path(args.curves).parent.is_dir()):
            raise UserError(f"--curves {args.curves}: must name a file in a folder that exists")
        if args.wandb and not importlib.util.find_spec("wandb"):
            raise UserError("--wandb: the package wandb is not installed (pip install wandb)")
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:   # nohup lets it go on
                signal.signal(getattr(signal, name), self._on_signal)

    def _on_signal(self, number, frame):
        if self.stopped and number == signal.SIGHUP:   # a shell and the kernel send one each
            return
        if self.stopped:   # the second one means now, and a third must not end the way out
            ignore_signals()
            raise KeyboardInterrupt
        self.stopped = signal.Signals(number).name
        if number == signal.SIGHUP:
            leave_terminal()
        print(f"\n{self.stopped}: the step is finished, then all is saved (once more to stop at once)", flush=True)

    def start(self, model, data, device, used, adapter=None):
        """
        Makes the folder, config.json, a copy of the script, the start record. model, adapter: folders; data: task
        files; used: what flags without a value came to (a default that hangs on the arm, the number of steps).
        """
        self.device, self.used = device, used
        self.model = model_record(self.args, model, adapter) if model else {"name": None}
        self.parent = parent_run(model, adapter)
        self.data = [{"path": short_path(p), "sha256": sha256_file(p),
                      "rows": sum(1 for line in open(p, "rb") if line.strip())} for p in data]
        script = Path(sys.argv[0]).resolve()
        config = {"args": vars(self.args), "used": used, "arm": self.arm, "argv": sys.argv[1:], "git": git_state(),
                  "versions": versions(), "device": device_name(device), "model": self.model, "data": self.data,
                  "script_sha256": sha256_file(script),
                  "settings_sha256": sha256_settings(model or getattr(self.args, "tokenizer", None), adapter,
                                                     getattr(self.args, "template", None))}
        if self.args.resume:
            try:
                old = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
                same = [("the script", old["script_sha256"], config["script_sha256"]),
                        ("the model", old["model"].get("sha256"), self.model.get("sha256"))] + [
                    (d["path"], b["sha256"], d["sha256"]) for b, d in zip(old["data"], self.data, strict=True)]
                if "settings_sha256" in old:
                    same.append(("the model's config, tokenizer or chat template", old["settings_sha256"],
                                 config["settings_sha256"]))
                if old["git"]["commit"] != config["git"]["commit"]:   # engine, envs and this file are not compared
                    self.note(f"begun at commit {old['git']['commit']}, resumed at {config['git']['commit']}")
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise UserError(f"--resume {self.folder}: its config.json is not the one that the run wrote "
                                f"({type(e).__name__}: {e})") from e
            for what, before, now in same:
                if before != now:
                    raise UserError(f"--resume {self.folder}: {what} has changed since the run started "
                                    f"({str(before)[:12]} then, {str(now)[:12]} now)")
        else:
            self.make_folder()
            shutil.copy(script, self.folder / script.name)
            write_json(self.folder / "config.json", config)
            self.hold()
        self.config, self.started, self.wandb = config, True, None
        if self.args.wandb:
            import wandb
            self.wandb = wandb.init(project="nanopost", name=self.folder.name, config=vars(self.args))
        for text in [] if self.args.resume else self.args.predict:
            record_prediction(self.args.labbook, self.folder.name, text)
        append_record(self.args.labbook, self._record("start"),
                      f"- {time.strftime('%Y-%m-%d %H:%M')} start {self.folder.name}")
        if (self.folder / "final.json").exists():   # of fewer steps: it is not the end of what goes on now
            os.replace(self.folder / "final.json", self.folder / "final-before.json")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def hold(self):
        """One process a run folder, until it ends: two would write the same rows twice."""
        try:
            self.held = open(self.folder / "config.json", "r+", encoding="utf-8")   # over NFS only a writer may lock
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UserError(f"--resume {self.folder}: another process is at work in it") from e
        except OSError as e:
            raise UserError(f"{self.folder}: its config.json cannot be locked ({e.strerror})") from e

    def check_folder(self):
        """A checkpoint would make a folder that was moved away anew, without its beginning."""
        if not (self.folder / "config.json").exists():
            raise RunError(f"{self.folder}: the run folder was moved or removed")

    def make_folder(self):
        while True:
            try:
                return self.folder.mkdir(parents=True)
            except FileExistsError as e:
                if not self.folder.exists():
                    raise UserError(f"--output-dir {self.folder}: cannot be made (it, or a folder above it, is a link "
                                    f"that leads nowhere)") from e
                if self.args.output_dir:
                    raise UserError(f"--output-dir {self.folder} exists; take another") from e
                self.folder = self.folder.with_name(self.folder.name + "x")   # two runs started in one second
            except OSError as e:
                raise UserError(f"--output-dir {self.folder}: cannot be made ({e.strerror})") from e

    def _record(self, kind, **more):
        args = {**recorded_flags(self.args), **self.used}
        return {"kind": kind, "run_id": self.folder.name, "parent": self.parent,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "script": self.script, "arm": self.arm,
                "task": getattr(self.args, "task", None), "model": self.model, "data": self.data,
                "seed": self.args.seed, "config": args, **more, "git": self.config["git"],
                "versions": self.config["versions"], "device": self.config["device"], "notes": self.args.notes}

    def note(self, text):
        """Says it, and keeps it for the record."""
        print(text)
        self.remark = "; ".join(x for x in (self.remark, text) if x)

    def log(self, step, metrics, total, show):
        """Metrics of a step to metrics.jsonl and the terminal; `show` names what the terminal sees, in order."""
        self.last = metrics
        self.check_folder()
        append_jsonl(self.folder / "metrics.jsonl", [{"step": step, **metrics}])
        line = "  ".join(f"{k} {metrics[k]:.4g}" for k in show if metrics.get(k) is not None)
        if self.wandb:
            self.wandb.log(metrics, step=step)
        if sys.stdout.isatty():
            from tqdm import tqdm
            if not hasattr(self, "bar"):
                self.bar = tqdm(total=total, initial=step - 1, desc=self.arm, dynamic_ncols=True)
            self.bar.set_postfix_str(line)
            self.bar.update(step - self.bar.n)   # a rollout may be several steps
        else:
            print(f"step {step}/{total}  {line}", flush=True)

    def evaluated(self, step, results):
        """
        Keeps one evaluation, {split: result of evaluate()}: in eval.jsonl, its answers in eval_samples.jsonl, its
        scores in the record.
        """
        if step not in self.seen:   # else it was written before a kill, and is made again for the record alone
            for split, r in results.items():   # the prompts of a split are in its file
                append_jsonl(self.folder / "eval_samples.jsonl", [
                    {"step": step, "split": split, **a, "ids": a["ids"][a["prompt_length"]:]}
                    for a in r.get("samples", [])])
            append_jsonl(self.folder / "eval.jsonl", [
                {"step": step, "split": s, **{k: v for k, v in r.items() if k != "samples"}}
                for s, r in results.items()])
        self.seen.add(step)
        for split, r in results.items():
            brief = {**{f"pass@{k}": v for k, v in r["pass_at"].items()},
                     **{f"lenient_pass@{k}": v for k, v in r["lenient_pass_at"].items()},
                     "se": r["se"], "greedy": r.get("greedy_pass"), "lenient_greedy": r.get("lenient_greedy_pass"),
                     **{k: r[k] for k in ("mean_length", "truncated", "entropy") if k in r},
                     "parsable": r.get("behaviour", {}).get("parsable")}
            self.scores.setdefault(split, {})["after" if step else "before"] = brief
        if hasattr(self, "bar"):
            self.bar.clear()

    def save(self, step, save_checkpoint):
        """
        Writes checkpoint-STEP/ by save_checkpoint(folder), then swings the link `checkpoint` to it and drops the
        oldest: whoever is killed at any moment finds a whole checkpoint behind the link.
        """
        name = f"checkpoint-{step:06d}"
        self.check_folder()
        shutil.rmtree(self.folder / name, ignore_errors=True)
        save_checkpoint(self.folder / name)
        self.point("checkpoint", name)
        # a later one, or a half one, was left by a kill before its link: the run that went on from here drops it
        found = sorted(self.folder.glob("checkpoint-*"))
        kept = [f for f in found if f.suffix != ".tmp" and f.name <= name][-self.args.keep:]
        for old in set(found) - set(kept):
            shutil.rmtree(old)

    def point(self, link, name):
        """Makes `link` in the run folder lead to `name`, in one step."""
        tmp = self.folder / f"{link}.tmp-link"
        tmp.unlink(missing_ok=True)
        tmp.symlink_to(name)
        os.replace(tmp, self.folder / link)

    def save_best(self, step, save_model):
        """
        Writes best-STEP/ and swings the link `best` to it. The one before stays until the next checkpoint, because a
        run that is killed before it goes on from the checkpoint that names it.
        """
        shutil.rmtree(self.folder / f"best-{step:06d}", ignore_errors=True)
        save_model(self.folder / f"best-{step:06d}")
        self.point("best", f"best-{step:06d}")

    def keep_best(self, step):
        """After a checkpoint or a resume: `best` leads to that step's (None: nowhere), the others go."""
        name = f"best-{step or 0:06d}"
        if step:
            self.point("best", name)
        else:
            (self.folder / "best").unlink(missing_ok=True)
        for old in self.folder.glob("best-*"):
            if old.name != name:
                shutil.rmtree(old)

    def state(self):
        return {"budget": self.budget, "wall_s": self.wall_s(), "scores": self.scores, "losses": self.losses}

    def resumes_at(self, state, steps):
        """
        state: that of load_checkpoint -> its step, where there is something left to do and the folder is whole; else a
        UserError, before anything is written.
        """
        step, ours = state["step"], state.get("run")
        if type(step) is not int or step < 0 or not isinstance(ours, dict) or not {"budget", "wall_s", "scores"} <= set(
                ours):
            raise UserError(f"--resume {self.folder}: its resume.pt is not whole (step {step!r}, run "
                            f"{type(ours).__name__})")
        for name in STEP_FILES:
            path = self.folder / name
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
            for i, line in enumerate(lines, 1):
                try:
                    int(json.loads(line)["step"])
                except (ValueError, KeyError, TypeError) as e:
                    raise UserError(f"--resume {self.folder}: {name}, line {i} is no row of the run "
                                    f"({type(e).__name__}); mend it or take the line out") from e
        final = self.folder / "final.json"
        try:
            ended = final.exists() and json.loads(final.read_text(encoding="utf-8")).get("status") == "ok"
        except (ValueError, AttributeError) as e:
            raise UserError(f"{final}: not the record of a run ({type(e).__name__}); take it away to go on") from e
        if step > steps or (step == steps and ended):
            raise UserError(f"--resume {self.folder}: its checkpoint is at step {step}, and --max-steps is {steps}: "
                            f"nothing is left to do (a larger --max-steps goes on)")
        return step

    def evaluation_due(self, first):
        """Whether an evaluation belongs before the first step: the untrained one, or one that a kill took away."""
        return first == 0 or (due(first, self.args.eval_every) and first not in self.seen)

    def restore(self, step, state):
        """
        Back to the state at `step`: rows that later steps wrote are cut from the files, since they come again, and so
        are evaluations that a kill has torn (one split is there and another is not), with their answers.
        """
        self.budget, self.wall_before, self.scores = state["budget"], state["wall_s"], state["scores"]
        self.losses = state.get("losses", {})
        for name in STEP_FILES:   # eval.jsonl stands before eval_samples.jsonl, whose rows are written first
            path = self.folder / name
            if not path.exists():
                continue
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]   # behind the last \n: a torn row
            steps = [json.loads(line)["step"] for line in lines]
            rows = [(s, line + "\n") for s, line in zip(steps, lines) if s <= step]
            if name == "eval.jsonl":
                splits = {s: set() for s, _ in rows}
                for s, line in rows:
                    splits[s].add(json.loads(line)["split"])
                self.seen = {s for s, has in splits.items() if has == set().union(*splits.values())}
            if name.startswith("eval"):
                rows = [(s, line) for s, line in rows if s in self.seen]
            if name == "metrics.jsonl" and rows:
                self.last = {k: v for k, v in json.loads(rows[-1][1]).items() if k != "step"}
            write_text(path, "".join(line for _, line in rows))

    def wall_s(self):
        return self.wall_before + time.monotonic() - self.t0

    def end(self, status, notes=""):
        """The one `run` record: into the labbook, and the same into final.json."""
        scale = 2 ** 20 if platform.system() == "Linux" else 2 ** 30   # ru_maxrss: KiB on Linux, bytes on macOS
        hours = self.wall_s() / 3600
        budget = {**self.budget, "wall_s": round(self.wall_s(), 1),
                  "peak_mem_gib": peak_mem_gib(self.device),
                  "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale, 3),
                  "cost": None if self.args.price_per_hour is None else round(hours * self.args.price_per_hour, 4)}
        record = self._record("run", budget=budget, losses=finite(self.losses), scores=finite(self.scores),
                              status=status)
        record["notes"] = "; ".join(x for x in (self.args.notes, self.remark, notes) if x)
        gains = "; ".join(f"{s} pass@1 {v['before']['pass@1']:.3f} -> {v['after']['pass@1']:.3f}"
                          for s, v in self.scores.items() if "before" in v and "after" in v)
        prose = f"- {time.strftime('%Y-%m-%d %H:%M')} {status} {self.folder.name} {gains}"
        self.ended = True
        record = append_record(self.args.labbook, record, prose)
        write_json(self.folder / "final.json", record)
        self.held.close()
        if self.wandb:
            signal.signal(signal.SIGINT, signal.SIG_DFL)   # all is written, and an upload may hang
            self.wandb.finish()
        return record

    def finish(self, summary=""):
        """The end of every script: curves, the record, one summary line, the exit code."""
        ignore_signals()   # nothing is left to stop
        write_curves(self.folder, self.args.curves)
        self.end("stopped" if self.stopped else "ok", self.stopped or "")
        if hasattr(self, "bar"):
            self.bar.close()
        pairs = [f"{s} pass@1 {v['before']['pass@1']:.3f} -> {v['after']['pass@1']:.3f} (greedy "
                 f"{v['before']['greedy']:.3f} -> {v['after']['greedy']:.3f})"
                 for s, v in self.scores.items() if "before" in v and "after" in v]
        said = "; ".join(pairs + ([summary] if summary else [])) or "done"
        saved = f"{self.stopped}, all saved, --resume goes on: " if self.stopped else ""
        print(f"{saved}{said}  {self.wall_s():.0f} s  run folder {self.folder}")
        sys.exit({None: 0, "SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}[self.stopped])

    def fail(self, text, trace):
        """Called by the excepthook -> what to add to the error line."""
        if not self.started:
            return ""
        try:
            if not self.ended:   # first the labbook, which may lie where there still is room
                self.end("failed", text)
            write_text(self.folder / "error.txt", trace)
        except OSError as e:   # not of the labbook, whose own errors are the user's
            return f" (recorded in {self.args.labbook}; the run folder {self.folder} cannot be written: {e.strerror})"
        where = self.folder / "checkpoint"
        kept = f"; last good checkpoint: {where.resolve().name}" if where.exists() else "; no checkpoint yet"
        return f" (run folder {self.folder}{kept})"


def recorded_flags(args):
    """The flags that a record keeps: all but where it is written and what only one machine has."""
    return {k: v for k, v in vars(args).items() if k not in (
        "resume", "labbook", "curves", "notes", "out", "predict")}


def finite(x):
    """NaN and infinity -> None, so that every record is strict JSON."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write_text(path, text):
    """Writes beside and renames: the file is the old one or the new one, never half."""
    tmp = Path(str(path) + ".tmp")
    with open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, path)


def write_json(path, obj):
    write_text(path, json.dumps(finite(obj), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def append_jsonl(path, rows):
    with open(path, "a", encoding="utf-8") as f:
        f.write("".join(json.dumps(finite(r), ensure_ascii=False, allow_nan=False) + "\n" for r in rows))


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def write_curves(folder, copy_to=None):
    """metrics.jsonl and eval.jsonl of a run folder -> curves.csv and curves.png (and the CSV again at copy_to)."""
    rows = read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    evals = read_jsonl(folder / "eval.jsonl") if (folder / "eval.jsonl").exists() else []
    by_step = {r["step"]: dict(r) for r in rows}
    for e in evals:
        by_step.setdefault(e["step"], {"step": e["step"]}).update(
            {f"{e['split']}.pass@{k}": v for k, v in e["pass_at"].items()})
    names = ["step"] + sorted({k for r in by_step.values() for k in r} - {"step"})
    for path in [folder / "curves.csv"] + ([Path(copy_to)] if copy_to else []):
        with open(path, "w", newline="") as f:
            out = csv.DictWriter(f, names, restval="")
            out.writeheader()
            out.writerows(by_step[s] for s in sorted(by_step))
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = [k for k in ("loss", "reward", "no_spread", "length", "entropy", "truncated", "grad_norm")
              if any(r.get(k) is not None for r in rows)]
    splits = sorted({e["split"] for e in evals})
    count = max(1, len(panels) + bool(splits))   # a run that was stopped at once has an empty picture
    fig, axes = plt.subplots(1, count, figsize=(3 * count, 2.6), squeeze=False)
    for ax, key in zip(axes[0], panels):
        ax.plot([r["step"] for r in rows if r.get(key) is not None],
                [r[key] for r in rows if r.get(key) is not None], linewidth=1)
        ax.set_title(key, fontsize=9)
    for split in splits:
        points = sorted((e["step"], e["pass_at"]["1"]) for e in evals if e["split"] == split)
        axes[0][-1].plot(*zip(*points), marker="o", label=split)
        axes[0][-1].set_title("pass@1", fontsize=9)
        axes[0][-1].legend(fontsize=7)
    for ax in axes[0]:
        ax.set_xlabel("step", fontsize=8)
        ax.tick_params(labelsize=7)
    fig.tight_layout()
    fig.savefig(folder / "curves.png", dpi=110)
    plt.close(fig)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens: one tokenizer, one function that applies the chat template, one that ends a completion

def load_tokenizer(folder, template=None):
    """The tokenizer of a model folder. Without a chat template (its own or --template FILE) there are no prompts."""
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as e:   # transformers raises anything from OSError to KeyError here
        raise UserError(f"{folder}: no tokenizer that transformers can load ({str(e).splitlines()[0]})") from e
    if template:
        try:
            tokenizer.chat_template = plain_file(template).read_text(encoding="utf-8")
        except OSError as e:
            raise UserError(f"--template {template}: {e.strerror}") from e
    if isinstance(tokenizer.chat_template, dict):   # several, by name
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if "strftime_now" in (tokenizer.chat_template or "") and "date_string" not in tokenizer.chat_template:
        raise UserError(f"{template or folder}: the chat template reads the clock (strftime_now), so that a prompt "
                        f"would differ from day to day; give one with a fixed date by --template FILE")
    if not tokenizer.chat_template:
        raise UserError(f"{folder}: the tokenizer has no chat template; give one with --template FILE")
    try:
        size = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):   # an adapter's folder has none; a bad one is the model's error
        return tokenizer
    # not its length: an id that no prompt has, such as a later pad token, does no harm
    most = max(encode_prompt(tokenizer, [{"role": "user", "content": "What is 12 + 30? End with #### NUMBER."}]))
    if isinstance(size, int) and most >= size:
        raise UserError(f"{folder}: its tokenizer writes id {most} ({tokenizer.decode([most])!r}) in a plain prompt, "
                        f"and config.json has vocab_size {size}: tokenizer and weights do not belong together")
    return tokenizer


def template_sha256(tokenizer):
    return hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()


def encode_prompt(tokenizer, messages):
    """Chat messages -> ids up to where the answer starts. Every prompt of every script is made here."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                             date_string="26 Jul 2024")   # Llama's take the day's, which changes
    except Exception as e:   # jinja has its own error classes
        raise UserError(f"the chat template cannot render {json.dumps(messages)[:80]} ({e})") from e
    return tokenizer(text, add_special_tokens=False)["input_ids"]   # the template wrote the special tokens already


def encode_completion(tokenizer, text, eos_id):
    """An answer as training text -> its ids and the id that ends it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [eos_id]


def prompt_number(name):
    """A problem's id -> the whole number that its random draws hang on; the same in every process."""
    return zlib.crc32(name.encode())


def order_at(step, per_step, rows, seed):
    """Indices of the problems of step 0, 1, ...: a fresh shuffle each epoch, computed from the step alone."""
    first, out, shuffles = step * per_step, [], {}
    for i in range(first, first + per_step):
        epoch = i // rows
        if epoch not in shuffles:
            shuffles[epoch] = np.random.default_rng([seed, epoch]).permutation(rows)
        out.append(int(shuffles[epoch][i % rows]))
    return out


def show_row(tokenizer, ids, mask):
    """One training row as text, trained tokens between [[ and ]]: a wrong mask is seen before it is paid for."""
    out, inside = [], False
    for i, m in zip(ids, mask):
        if bool(m) != inside:
            out.append("[[" if m else "]]")
            inside = bool(m)
        out.append(tokenizer.decode([int(i)]))
    return "".join(out) + ("]]" if inside else "")


# ----------------------------------------------------------------------------------------------------------------------
# Task files: JSON lines, checked when they are read

def plain_file(path):
    """The path, or UserError where it is a pipe or the like, which gives its text once and has no hash."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: no plain file, and it is read more than once (a pipe? write it to a file first)")
    return path


def read_rows(path, check, limit=None):
    """A JSON-lines file -> its rows, each passed through check(row), which raises ValueError with what is wrong."""
    path, rows = Path(path), []
    try:
        text = plain_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read ({e})") from e
    for i, line in enumerate(text.split("\n"), 1):   # not splitlines: U+2028 may stand inside a JSON string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            check(row)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            reason = f"{e.args[0]} is missing" if isinstance(e, KeyError) else str(e)
            raise UserError(f"{path}:{i}: {reason}") from e
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows (one JSON object a line is expected)")
    return rows[:limit]


def check_messages(messages, name):
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{name}` must be a list of chat messages")
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
            raise ValueError(f"`{name}` holds {json.dumps(m)[:60]}, expected {{\"role\": ..., \"content\": ...}}")
        half = re.search("[\ud800-\udfff]", m["role"] + m["content"])   # JSON may hold it, no tokenizer reads it
        if half:
            raise ValueError(f"`{name}` holds {half[0]!r}, half of a surrogate pair, which is no text; take it out")


def check_task_row(row):
    """A task row: {"id", "prompt": [messages], "answer", "task", ...}."""
    if not isinstance(row["id"], str) or not row["id"]:
        raise ValueError(f"`id` must be a text, got {row['id']!r}")
    check_messages(row["prompt"], "prompt")
    if not isinstance(row["answer"], (str, int)) or isinstance(row["answer"], bool):
        raise ValueError(f"`answer` must be a text or a whole number, got {row['answer']!r}")


def check_textbook_row(row):
    """A textbook row: {"prompt": [messages], "completion": [one assistant message]}."""
    check_messages(row["prompt"], "prompt")
    check_messages(row["completion"], "completion")
    if row["completion"][-1]["role"] != "assistant":
        raise ValueError(f"`completion` is of role {row['completion'][-1]['role']!r}, expected assistant")
    if not row["completion"][-1]["content"].strip():
        raise ValueError("`completion` is empty: there is nothing to train on")


# ----------------------------------------------------------------------------------------------------------------------
# Packing, log-probs, and the head in chunks

@dataclass
class Pack:
    """Some rows of a batch without padding."""
    ids: torch.Tensor        # (T,)
    lengths: list            # of the rows, they sum to T
    where: torch.Tensor      # (P,) places whose hidden state scores a trained token
    targets: torch.Tensor    # (P,) that token
    row: torch.Tensor        # (P,) its row in the batch
    col: torch.Tensor        # (P,) its column in logp (B, T - 1)


def pack_rows(ids, mask, length, rows, device):
    """ids, mask (B, T), length (B,), rows: row numbers -> Pack on `device`. Rows without a target are fine."""
    lengths = [int(length[b]) for b in rows]
    flat = torch.cat([ids[b, :n] for b, n in zip(rows, lengths)])
    trained = torch.cat([F.pad(mask[b, 1:n], (0, 1)) for b, n in zip(rows, lengths)])   # the last place scores nothing
    where = trained.nonzero()[:, 0]
    row = torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths))[where]
    col = torch.cat([torch.arange(n) for n in lengths])[where]
    targets = flat[where + 1] if len(where) else flat[:0]
    return Pack(flat.to(device), lengths, where.to(device), targets.to(device), row.to(device), col.to(device))


def micro_batches(length, rows, tokens):
    """Splits rows, in order, into groups of at most `tokens` tokens; a longer row stands alone."""
    groups, size = [], 0
    for b in rows:
        n = int(length[b])
        if not groups or size + n > tokens:
            groups.append([])
            size = 0
        groups[-1].append(b)
        size += n
    return groups


def head_dtype(hidden, weight):
    """The dtype of the head's factors: what the model says (Transformer.head_weight), else that of `hidden`."""
    return getattr(weight, "factors", None) or hidden.dtype


def output_logits(hidden, weight):
    """hidden (R, C) times weight (V, C) -> logits (R, V): factors as head_dtype says, sums and result fp32 or fp64."""
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    dtype = head_dtype(hidden, weight)
    if needs_grad and dtype == torch.float16:
        dtype = hidden.dtype   # autograd would round the gradient to fp16 too, where most of it is 0
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    if hidden.is_cuda and hidden.dtype != torch.float32 and not needs_grad:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(wide), weight.to(wide))


def chunk_rows(vocab, device):
    """Rows of logits held at once: 256 MiB of fp32 on a GPU, what fits a cache on a CPU."""
    return max(64, (2 ** 26 if device.type == "cuda" else 2 ** 21) // vocab)


@torch.no_grad()
def head_backward(hidden, weight, targets, fn, temperature=1.0, full=False, chunk=None):
    """
    The output head, its loss and their gradients, a chunk of positions at a time: the logits of all positions at once
    would be the largest tensor of the step by far, and the gradient of a chunk can be taken as soon as it is made.

    hidden (P, C): states that score `targets` (P,). fn(logp, entropy, rows) sees one chunk: logp (R,) of the targets at
    `temperature`, entropy (R,) in nats without gradient, rows: the slice of P. With full=True it sees fn(logits, rows),
    logits (R, V) already divided by the temperature. It returns the chunk's summed loss and a dict of summed metrics.
    All weights must be fixed before the walk, so that the gradient does not depend on the split.

    Adds to weight.grad, and returns the gradient of hidden (P, C) and the sums of the metrics; the caller ends with
    hidden.backward(gradient), one pass through the body.
    """
    grad, sums, dtype = torch.zeros_like(hidden), {}, head_dtype(hidden, weight)
    back = torch.bfloat16 if dtype == torch.float16 else dtype   # gradients are far smaller than fp16 numbers
    through = dtype != hidden.dtype   # the model runs through these kernels
    if through:
        import fused
    # the kernels keep half as much of a row as the passes below do, so that a chunk has twice the rows
    chunk = chunk or chunk_rows(weight.shape[0], hidden.device) * (2 if through and not full else 1)
    w = weight.detach().to(dtype)
    w_back = w if dtype == back else weight.detach().to(back)
    if weight.requires_grad and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, min(start + chunk, hidden.shape[0]))
        h = hidden[rows].detach()
        z = output_logits(h.to(dtype), w)                                            # (R, V) fp32
        if full:
            with torch.enable_grad():
                z.div_(temperature).requires_grad_()
                loss, metrics = fn(z, rows)
                dz = torch.autograd.grad(loss, z)[0].div_(temperature)
        else:
            if through:
                logp, entropy, lse = fused.head_stats(z, targets[rows], temperature)
            else:
                lse = z.div_(temperature).logsumexp(-1)
                logp = z.gather(1, targets[rows, None])[:, 0] - lse                  # (R,)
                p = (z - lse[:, None]).exp_()
                entropy = lse - (p * z).sum(-1)
            with torch.enable_grad():
                logp.requires_grad_()
                loss, metrics = fn(logp, entropy, rows)
                g = torch.autograd.grad(loss, logp)[0]
            if through:
                dz = fused.head_grad(z, lse, targets[rows], g, temperature)
            else:   # d logp_target / dz = onehot(target) - p
                dz = p.mul_(-g[:, None]).scatter_add_(1, targets[rows, None], g[:, None]).div_(temperature)
        dz, h = dz.to(back), h.to(back)
        grad[rows] = torch.mm(dz, w_back, out_dtype=hidden.dtype) if through else dz @ w_back
        if weight.requires_grad and weight.grad.dtype == dz.dtype:
            weight.grad.addmm_(dz.t(), h)   # without a temporary of (V, C)
        elif weight.requires_grad and through:
            torch.addmm(weight.grad, dz.t(), h, out_dtype=weight.grad.dtype, out=weight.grad)   # likewise
        elif weight.requires_grad:
            weight.grad.add_(dz.t() @ h)
        for k, v in metrics.items():
            sums[k] = sums.get(k, 0) + v.detach()
    return grad, sums


@torch.no_grad()
def score(model, rollout, temperature=1.0, tokens=16384):
    """
    Log-probs and entropies (nats) that `model` gives the sampled tokens of a rollout (ids, mask (B, T), length (B,)):
    (B, T - 1) fp32 each on the CPU, 0 where mask[:, 1:] is False. `tokens` go through the body at once.
    """
    ids, mask, length = rollout.ids, rollout.mask, rollout.length
    logp, entropy = torch.zeros(ids.shape[0], ids.shape[1] - 1), torch.zeros(ids.shape[0], ids.shape[1] - 1)
    for rows in micro_batches(length, range(ids.shape[0]), tokens):
        p = pack_rows(ids, mask, length, rows, model.device)
        hidden = model(p.ids, p.lengths)[p.where]
        chunk, weight = chunk_rows(model.head_weight.shape[0], model.device), model.head_weight
        dtype = head_dtype(hidden, weight)
        through, hidden, weight = dtype != hidden.dtype, hidden.to(dtype), weight.to(dtype)
        if through:   # the model runs through these kernels
            import fused
        for s in range(0, len(p.targets), chunk):
            z, targets = output_logits(hidden[s:s + chunk], weight), p.targets[s:s + chunk]
            if through:
                part_logp, part_entropy, _ = fused.head_stats(z, targets, temperature)
            else:
                all_logp = (z / temperature).log_softmax(-1)
                part_logp = all_logp.gather(1, targets[:, None])[:, 0]
                part_entropy = -(all_logp.exp() * all_logp).sum(-1)
            places = (p.row[s:s + chunk].cpu(), p.col[s:s + chunk].cpu())
            logp[places], entropy[places] = part_logp.cpu(), part_entropy.cpu()
    return logp, entropy


def check_sampler(step, sums, model, rollout, temperature=1.0, few=8):
    """
    The canary of a step's first update, when trainer and sampler still have the same weights: their log-probs of the
    sampled tokens must agree, else the sampler runs on other weights or another distribution (RunError). sums: those of
    the update; where it trained on nothing, `few` rows are scored, since a broken sampler may earn no reward at all.
    Engine.check_weights asks at each rollout, to the bit, of what is shared and of one copy in turn.
    """
    if sums.get("tokens"):
        mean = float(sums["mismatch"]) / float(sums["tokens"])
    else:
        part = SimpleNamespace(ids=rollout.ids[:few], mask=rollout.mask[:few], length=rollout.length[:few])
        gap = (score(model, part, temperature)[0] - rollout.logp[:few]).abs()
        mean = float(gap.sum() / part.mask[:, 1:].sum())
    limit = 0.1 if model.compute_dtype != torch.float32 else 0.001
    if not mean <= limit:
        raise RunError(f"step {step}: log-probs of sampler and trainer differ by {mean:.3g} a token on average (limit "
                       f"{limit} in {str(model.compute_dtype)[6:]}): the samples did not come from the current weights")


def at_places(values, pack):
    """values (B, T - 1), or None -> its entries at the trained places of a pack (P,), on the pack's device."""
    return None if values is None else values[pack.row.cpu(), pack.col.cpu()].to(pack.ids.device)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers: reading an answer, and comparing it

NUMBER = re.compile(r"""
    (?P<sign>[-+−–]?)\s?(?:\\?[$€£])?(?P<sign2>[-−–]?)\s?               # -3, -$40, $-40
    (?: \\[dt]?frac\{\s*(?P<fn>-?\d+)\s*\}\{\s*(?P<fd>\d+)\s*\}         # \frac{3}{4}
      | (?P<int>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?P<dec>\.\d+)?            # 1,234.5
        (?:\s?/\s?(?P<den>\d+(?:\.\d+)?)(?![\d/]))?                     # 1/2
      | (?P<bare>\.\d+) )""", re.VERBOSE)                               # .5
# What may stand before a number, and what shows that it is only the beginning of something else.
OPENING = re.compile(r"(?:[\s*`_=:~$({\[]|\\[(\[]|\\(?:boxed|text|mathrm|mathbf)\{)*")
GOES_ON = re.compile(r"""
      [,.'’_]\d | [eE][-+]?\d | \s?\d | \s?\\[dt]?frac                                # 1,23  1.2.3  1e5  3 1/2
    | \s?(?:[-+−–*/^:x×÷·]|\*\*|\\times|\\cdot|\\div)\s?[$({]?\d""", re.VERBOSE)      # 2*3  10^{3}  7 - 3  3:30


def plain(text):
    """Text without the ways in which LaTeX writes a thousands comma: 1{,}234 and 1\\,234."""
    return text.replace("{,}", ",").replace(",\\!", ",").replace("\\,", "")


def to_fraction(m):
    """A match of NUMBER -> Fraction, or None for a division by zero and for digits without end."""
    if len(m[0]) > 1000:   # int() refuses more than 4300 digits, and a policy may well write them
        return None
    if m["fn"] is not None:
        top, bottom = Fraction(m["fn"]), Fraction(m["fd"])
    else:
        top = Fraction(m["bare"] if m["bare"] else m["int"].replace(",", "") + (m["dec"] or ""))
        bottom = Fraction(m["den"] or 1)
    if bottom == 0:
        return None
    negative = (m["sign"] in tuple("-−–")) != (m["sign2"] in tuple("-−–"))
    return (-top if negative else top) / bottom


def read_number(text, whole=False):
    """
    The number a text starts with, as a Fraction. None when it starts with something else or with an expression (2*3).
    whole: nothing but the number may stand there, as is right for an answer key.
    """
    text = plain(text)
    m = NUMBER.match(text, OPENING.match(text).end())
    if not m or GOES_ON.match(text, m.end()) or (whole and text[m.end():].strip(" .%$€£\n")):
        return None
    return to_fraction(m)


def strict_answer(text):
    """The marked answer: the number behind the last `####`, on its line. None when there is no mark or no number."""
    if "####" not in text:
        return None
    return read_number(text.rpartition("####")[2].split("\n")[0])


def lenient_answer(text):
    """The marked answer, else the last \\boxed{...}, else the last number anywhere. None when there is no number."""
    found = strict_answer(text)
    if found is None and "\\boxed{" in text:
        found = read_number(text.rpartition("\\boxed{")[2])
    if found is None:
        # A hyphen behind a word or number joins ("part-2", "7-3"), one before a space is a bullet or a subtraction.
        bare = re.sub(r"(?<=[\w)%])[-−–](?=[$\d])|[-−–](?=\s)", " ", plain(text))
        numbers = list(NUMBER.finditer(bare))
        found = to_fraction(numbers[-1]) if numbers else None
    return found


def same_number(a, b, tolerance=Fraction(1, 10 ** 6)):
    return a is not None and b is not None and abs(a - b) <= tolerance


# ----------------------------------------------------------------------------------------------------------------------
# pass@k and statistics

def pass_at_k(n, c, k):
    """1 - C(n - c, k) / C(n, k): the chance that k of the n samples, c of them right, hold a right one (2107.03374)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n; got n {n}, c {c}, k {k}")
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k)) if n - c >= k else 1.0


def mean_and_se(values):
    """Mean over problems and its standard error; the error is None for fewer than two problems."""
    x = np.asarray(values, float)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else None


def paired_difference(before, after):
    """Mean and standard error over problems of after - before, the same problems in the same order."""
    if len(before) != len(after):
        raise ValueError(f"paired values must come from the same problems; got {len(before)} and {len(after)}")
    return mean_and_se(np.asarray(after, float) - np.asarray(before, float))


def interval(values, seed=0, repeats=2000):
    """
    95% interval of the mean of values in [0, 1] over problems -> (low, high, kind). The bootstrap resamples problems,
    not samples. Near 0 and 1 it covers too little (few problems carry all the spread), so outside [.1, .9] it is the
    Wilson score interval on the number of problems, which for values between 0 and 1 is on the safe side.
    """
    x = np.asarray(values, float)
    mean, n = float(x.mean()), len(x)
    if 0.1 <= mean <= 0.9 and n > 1:
        picks = np.random.default_rng(seed).integers(0, n, (repeats, n))
        low, high = np.quantile(x[picks].mean(1), [0.025, 0.975])
        return float(low), float(high), "bootstrap"
    z = 1.959964
    middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half), "wilson"
