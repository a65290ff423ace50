"""
Speed and memory, each beside what a user would pick instead: the same work, in one run, on one machine.

    python bench.py rollout    sampled tokens a second, start-up, skewed lengths        against HF generate and vLLM
    python bench.py train      a whole GRPO step, a learning step, sampler against trainer      against TRL
    python bench.py memory     three ways to cut a batch; the step of full-parameter GRPO in little memory
    python bench.py cpu        rollout and train at a size that two CPU cores can bear          against HF and TRL
    python bench.py sandbox    programs a second        against a fresh interpreter a program, and bubblewrap

Figures are medians over --repeats rounds, after a warm-up; in every round each contestant runs once, so that a slow
moment of the machine hits all of them (memory takes one round: a peak is no median). A share says what part of the
physical limit was reached, from the bandwidth and the matrix rate that this run measured. Weights are random unless
--shape is a folder, lengths are forced, rewards are made up (0 and 1 in turn), so that every step has a gradient. An
alternative that is not installed, or fails, has a line that says so. Everything goes into one labbook record of kind
`bench`.
"""
# ruff: noqa: E402
import time

BEGAN = time.perf_counter()   # before torch is read: that is part of a start

import argparse
import gc
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

import common
from common import UserError, number
from engine import Engine
from envs import get_task
from model import Config, Transformer, find_folder, llama_config, load_model, read_json, save_model
from train_grpo import Places, group_advantage, grpo_loss, token_weights

IMPORTS_S = time.perf_counter() - BEGAN
MODES = {"rollout": ["hf", "vllm"], "train": ["trl"], "cpu": ["hf", "trl"], "memory": [], "sandbox": []}   # and rivals
UNREAD = {"rollout": ["optim"], "train": [], "cpu": ["device"],   # flags that a mode has no use for: an error there
          "memory": ["rows", "new", "num_generations", "repeats", "optim"],
          "sandbox": ["shape", "rows", "prompt", "new", "num_generations", "optim", "device", "precision"]}


def shape(kind, vocab, hidden, layers, heads, kv_heads, ffn):
    return llama_config(vocab, hidden, layers, heads, kv_heads, ffn, context=4096, eos=0, pad=1) | {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}


SHAPES = {"4.7m": shape("Llama", 4096, 256, 5, 4, 2, 704),
          "135m": shape("Llama", 49152, 576, 30, 9, 3, 1536),      # SmolLM2
          "0.5b": shape("Qwen2", 151936, 896, 24, 14, 2, 4864),    # Qwen2.5
          "1.5b": shape("Qwen2", 151936, 1536, 28, 12, 2, 8960)}   # Qwen2.5


def get_args(argv=None):
    p = common.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", choices=MODES, help="what is measured")
    p.add_argument("--against", nargs="*", choices=["hf", "vllm", "trl"], help="rivals (default: all of the mode)")
    p.add_argument("--shape", default=None, help=f"{', '.join(SHAPES)}, or a model folder (default: 135m, cpu: 4.7m)")
    p.add_argument("--rows", nargs="+", type=number(int, 1), default=None, help="samples at once (default: 64)")
    p.add_argument("--prompt", type=number(int, 2), default=None, help="prompt tokens (default: 128, cpu: 32)")
    p.add_argument("--new", type=number(int, 8), default=None, help="sampled tokens a row (default: 256, cpu: 64)")
    p.add_argument("--num-generations", type=number(int, 2), default=8, help="answers a problem, one group")
    p.add_argument("--repeats", type=number(int, 1), default=3, help="timed rounds, after one that warms up")
    p.add_argument("--optim", default="adamw", choices=common.OPTIMS,
                   help="fp32 weights; bf16 weights, rounded stochastically; fp32 weights, 8-bit moments")
    p.add_argument("--device", default="auto", help="cuda, mps, cpu, or auto: the first that is there")
    p.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"],
                   help="dtype of the products (auto: bf16 on cuda, fp32 elsewhere)")
    p.add_argument("--labbook", default="labbook.md", help="file that gets the record")
    p.add_argument("--notes", default="", help="free text for the record")
    args = p.parse_args(argv)
    for rival in args.against or []:
        if rival not in MODES[args.mode]:
            p.error(f"--against {rival} is not measured by {args.mode}, which knows {MODES[args.mode] or 'none'}")
    for flag in UNREAD[args.mode]:
        if getattr(args, flag) != p.get_default(flag):
            p.error(f"--{flag.replace('_', '-')} is not read by {args.mode}; leave it out")
    if args.mode == "train" and len(args.rows or []) > 1:
        p.error(f"--rows {' '.join(map(str, args.rows))}: train takes one number, the answers of a step")
    small = args.mode == "cpu"
    defaults = {"against": MODES[args.mode], "shape": "4.7m" if small else "135m", "rows": [64],
                "prompt": 32 if small else 128, "new": 64 if small else 256}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for rows in args.rows:
        if rows % args.num_generations:
            p.error(f"--rows {rows} must be a multiple of --num-generations {args.num_generations}")
    return args


def check_shape(args):
    """Refuses a shape that is none, and rows that do not fit its context, before minutes are spent on them."""
    if args.shape not in SHAPES and not Path(args.shape).is_dir():
        raise UserError(f"--shape {args.shape}: neither one of {', '.join(SHAPES)} nor a folder")
    raw = SHAPES.get(args.shape) or read_json(find_folder(args.shape) / "config.json")
    most, need = Config.from_dict(raw, args.shape).max_position_embeddings, args.prompt + args.new
    if args.mode != "memory" and need > most:   # memory has lengths of its own
        raise UserError(f"--prompt {args.prompt} and --new {args.new} are {need} tokens, and the context of --shape "
                        f"{args.shape} is {most}: lower --new to {most - args.prompt} or less")


# ----------------------------------------------------------------------------------------------------------------------
# The machine, the clock, the table

@dataclass
class Machine:
    device: torch.device
    dtype: torch.dtype         # of the products
    ready_s: float             # Python, torch, this file, and the device's first answer
    copy: float = 0.0          # bytes/s of a large copy, read and written
    product: float = 0.0       # FLOP/s of a large product of random numbers in `dtype`

    def clock(self, fn):
        """-> (seconds, what fn returned)"""
        self.sync()
        began = time.perf_counter()
        out = fn()
        self.sync()
        return time.perf_counter() - began, out

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self):
        cuda = self.device.type == "cuda"
        a = torch.zeros(2 ** 31 if cuda else 2 ** 27, dtype=torch.uint8, device=self.device)
        b, n = torch.empty_like(a), 8192 if cuda else 1024
        x = torch.randn(n, n, device=self.device).to(self.dtype)
        self.copy = 2 * len(a) / min(self.clock(lambda: b.copy_(a))[0] for _ in range(5))
        self.product = 10 * n ** 3 / min(self.clock(lambda: [x @ x for _ in range(5)])[0] for _ in range(5))


class Table:
    """One line a figure, printed as it is made, kept for the record."""

    def __init__(self):
        self.lines = []
        print("| case | who | figure | share of the limit | |\n| --- | --- | --- | --- | --- |")

    def add(self, case, who, value, unit="", share=None, note=""):
        self.lines.append({"case": case, "who": who, "value": value, "unit": unit, "share": share, "note": note})
        text = value if isinstance(value, str) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        print(f"| {case} | {who} | {text} {unit} | {'' if share is None else f'{share:.1%}'} | {note} |", flush=True)


def short(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------------------
# What the hardware allows

def parts(config, params):
    """-> weights that a token multiplies with in the body, and in the head."""
    head = config.vocab_size * config.hidden_size
    return params - head * (1 if config.tie_word_embeddings else 2), head


def decode_floor(config, params, rows, context, m):
    """
    Most tokens a second that memory and matrix units allow: all weights and the keys and values of every row are read
    once a step, logits are written once and read three times.
    """
    n, size = sum(parts(config, params)), m.dtype.itemsize
    kv = 2 * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    step = max(n * size / m.copy, 2 * n * rows / m.product)
    step += rows * (context * kv + 4 * size * config.vocab_size) / m.copy
    return rows / step


def learn_flops(config, params, lengths, trained):
    """6 a weight and token, the head on trained tokens alone; causal attention, its backward 2.5 times its forward."""
    body, head = parts(config, params)
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 6 * (body * sum(lengths) + head * trained) + 7 * width * sum(n * n for n in lengths)


# ----------------------------------------------------------------------------------------------------------------------
# Models

def make_model(args, m, dtype):
    """The shape with random weights, made on the device, or a folder's -> Transformer."""
    if args.shape not in SHAPES:
        return load_model(args.shape, dtype, m.device, m.dtype)
    with torch.device(m.device):
        model = Transformer(Config.from_dict(SHAPES[args.shape])).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.02) if p.ndim == 2 else p.fill_(0.0 if name.endswith("bias") else 1.0)
    model.compute_dtype = m.dtype
    return model


def make_prompts(args, vocab, rows, seed):
    """Fresh prompts for each round: nothing can be kept from the round before."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (rows // args.num_generations, args.prompt), generator=gen).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Rollout: each contestant is made by a function that returns go(prompts, seed) -> sampled tokens

def ours(args, m, folder):
    engine = Engine(make_model(args, m, m.dtype), slots=max(args.rows))
    return lambda prompts, seed: engine.generate(prompts, args.num_generations, max_new=args.new, eos_ids=(),
                                                 seed=seed).stats["tokens_sampled"]


def hf(args, m, folder, cache=None):
    """transformers' generate. Log-probs are not asked for: with them it keeps the logits of all steps."""
    from transformers import AutoConfig, AutoModelForCausalLM
    with torch.device(m.device):
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=m.dtype).eval()
    net.generation_config.eos_token_id = None

    def go(prompts, seed):
        torch.manual_seed(seed)
        ids = torch.tensor([p for p in prompts for _ in range(args.num_generations)], device=m.device)
        out = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                           top_p=1.0, min_new_tokens=args.new, max_new_tokens=args.new, pad_token_id=0,
                           cache_implementation=cache)
        return (out.shape[1] - ids.shape[1]) * out.shape[0]
    return go


def hf_static(args, m, folder):
    return hf(args, m, folder, "static")


def vllm(args, m, folder):
    """In this process, CUDA graphs and prefix cache on, log-probs of the distribution that was sampled from."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not importlib.util.find_spec("flashinfer"):
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams
    # 0.6 of the memory, since the others stay loaded; it holds the cache of all rows many times over
    llm = LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype=str(m.dtype)[6:], seed=0,
              gpu_memory_utilization=0.6, max_num_seqs=max(args.rows), max_model_len=args.prompt + args.new,
              enable_prefix_caching=True, logprobs_mode="processed_logprobs")

    def go(prompts, seed):
        how = SamplingParams(n=args.num_generations, max_tokens=args.new, temperature=1.0, ignore_eos=True,
                             detokenize=False, logprobs=0)
        out = llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
        return sum(len(o.token_ids) for r in out for o in r.outputs)
    return go


RIVALS = {"hf": ("transformers", {"HF generate": hf, "HF generate, static cache": hf_static}),
          "vllm": ("vllm", {"vLLM": vllm})}


def rollout(args, m, table):
    makers = {"ours": ours}
    for rival in [r for r in RIVALS if r in args.against]:
        package, more = RIVALS[rival]
        if importlib.util.find_spec(package):
            makers |= more
        else:
            table.add("rollout", ", ".join(more), "not installed", note=f"package {package}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        folder = Path(tmp) if args.shape in SHAPES else find_folder(args.shape)
        if args.shape in SHAPES:
            (folder / "config.json").write_text(json.dumps(SHAPES[args.shape] | {"dtype": str(m.dtype)[6:]}))
        # compile caches of earlier runs are set aside: a start is a first start
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
            os.environ[name] = str(Path(tmp) / name)
        steady = race(args, m, table, folder, makers)
        free_memory()
        skewed(args, m, table, steady)


def race(args, m, table, folder, makers):
    """Every contestant at every row count -> our median rate for each row count."""
    config = Config.from_dict(read_json(folder / "config.json"))
    with torch.device("meta"):
        params = Transformer(config).num_params()
    ready, rates = {}, {}
    for rows in sorted(args.rows):
        case, took, tokens = f"{args.shape}, {rows} rows", {name: [] for name in makers}, rows * args.new
        floor = decode_floor(config, params, rows, args.prompt + args.new / 2, m)

        def go(name, i):
            if name not in ready:
                ready[name] = makers[name](args, m, folder)
            got = ready[name](make_prompts(args, config.vocab_size, rows, i), i)
            if got != tokens:
                raise common.RunError(f"sampled {got} tokens, not {tokens}")

        for i in range(args.repeats + 1):   # round 0 warms up
            for name in list(took):
                fresh = name not in ready
                try:
                    took[name].append(m.clock(lambda: go(name, i))[0])
                except Exception as e:   # a rival's failure is a line of the table, not the end of the run
                    if name == "ours":
                        raise
                    table.add(case, name, "failed", note=short(e))
                    del took[name]
                    ready.pop(name, None)
                if name not in took:
                    free_memory()   # here, where the error no longer holds what it was about
                elif fresh:
                    table.add(f"start until the first {rows} samples", name, m.ready_s + took[name][0], "s",
                              note=f"with {m.ready_s:.1f} s for Python, torch and the device; no compile cache")
        rates[rows] = tokens / statistics.median(took["ours"][1:])
        for name, seconds in took.items():
            rate = tokens / statistics.median(seconds[1:])
            note = "" if name == "ours" else f"ours is {rates[rows] / rate:.2f} x as fast"
            table.add(case, name, rate, "tok/s", rate / floor, note + ", no log-probs" * name.startswith("HF"))
        makers = {name: makers[name] for name in took}
    return rates


def skewed(args, m, table, steady):
    """Four samples a slot; every other one stops after an eighth of the tokens: what do ragged ends cost?"""
    slots = 256 if 256 in steady else max(steady)
    engine = Engine(make_model(args, m, m.dtype), slots=slots)
    limit, ratios = [args.new // 8 if b % 2 == 0 else args.new for b in range(4 * slots)], []
    for i in range(args.repeats + 1):
        prompts = make_prompts(args, engine.model.config.vocab_size, 4 * slots, i)
        even, ragged = (engine.generate(some, args.num_generations, max_new=new, eos_ids=(), seed=i).stats
                        for some, new in ((prompts[:len(prompts) // 4], args.new), (prompts, limit)))
        ratios.append(even["tokens_per_s"] / ragged["tokens_per_s"])
    table.add(f"skewed lengths, {4 * slots} samples in {slots} slots", "ours", statistics.median(ratios[1:]),
              "x the time at the steady rate", note=f"{args.new // 8} and {args.new} tokens in turn")


# ----------------------------------------------------------------------------------------------------------------------
# Train: the GRPO step of train_grpo.py, with made-up rewards

def learn(model, optimizer, r, group, micro):
    """One update on a rollout -> summed metrics. Rewards 0 and 1 in turn: every row has an advantage."""
    rows, device = len(r.ids), model.device
    adv = group_advantage((torch.arange(rows) % 2).float().view(-1, group)).flatten().to(device)
    weight = token_weights("sequence", r.mask.sum(1), 0).to(device)
    args, sums = argparse.Namespace(eps=0.2, beta=0.0), {}
    for some in common.micro_batches(r.length, range(rows), micro):
        p = common.pack_rows(r.ids, r.mask, r.length, some, device)
        b = Places(adv=adv[p.row], weight=weight[p.row], sampler=common.at_places(r.logp, p))
        hidden = model(p.ids, p.lengths)[p.where]
        grad, part = common.head_backward(hidden, model.head_weight, p.targets,
                                          lambda logp, entropy, at: grpo_loss(logp, at, b, args))
        hidden.backward(grad)
        for k, v in part.items():
            sums[k] = sums.get(k, 0) + float(v)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums


def micro_tokens(model):
    """Tokens of a backward pass: what takes half of the free memory, at most 65,536 (CPU: 16,384)."""
    free, _ = common.memory_free(model.device)
    most = 65536 if model.device.type == "cuda" else 16384
    fit = int(free / 2 / (model.config.num_hidden_layers * common.layer_bytes(model))) if free else most
    return max(1024, min(most, fit))


def trainer(args, m, optim, slots):
    model = make_model(args, m, common.weight_dtype(optim))
    return model, common.make_optimizer(model, 1e-6, optim=optim), Engine(model, slots=slots)


def train(args, m, table):
    rows, group = args.rows[0], args.num_generations
    model, optimizer, engine = trainer(args, m, args.optim, rows)
    micro, vocab = micro_tokens(model), model.config.vocab_size

    def step(i, prompts=None):
        roll, r = m.clock(lambda: engine.generate(prompts or make_prompts(args, vocab, rows, i), group, seed=i,
                                                  max_new=args.new, eos_ids=(), entropy=True))
        lrn, sums = m.clock(lambda: learn(model, optimizer, r, group, micro))
        flops = learn_flops(model.config, model.num_params(), r.length.tolist(), int(sums["tokens"]))
        return {"step": roll + lrn, "rollout": roll, "learning": lrn, "share": flops / lrn / m.product,
                "mismatch": sums["mismatch"] / sums["tokens"]}

    def show(case, steps):
        mid = {k: statistics.median(s[k] for s in steps) for k in steps[0]}
        table.add(case, "ours", mid["step"], "s a step", note=common.OPTIMS[args.optim][0])
        table.add(case, "ours: rollout", mid["rollout"], "s")
        table.add(case, "ours: learning", mid["learning"], "s", mid["share"], f"{micro} tokens a backward pass")
        table.add(case, "ours: log-prob difference of sampler and trainer, mean", mid["mismatch"], "nats a token")
        return mid["step"]

    step(0)
    case = f"GRPO step, {args.shape}, {rows // group} x {group} samples, {args.prompt} + {args.new} tokens"
    show(case, [step(i) for i in range(1, args.repeats + 1)])
    if args.mode != "cpu":
        learn_long_rows(args, m, table, model, optimizer, micro)
        agreement(args, m, table)
    if "trl" not in args.against:
        return
    if not importlib.util.find_spec("trl"):
        return table.add(case, "TRL", "not installed", note="package trl")
    if args.shape in SHAPES and m.device.type == "cuda":
        return table.add(case, "TRL", "left out", note="needs real weights, --shape FOLDER: with random ones its "
                                                       "gradients are not finite on a GPU")
    variants = {"TRL, HF generate": False}
    if m.device.type == "cuda" and importlib.util.find_spec("vllm"):
        variants["TRL, vLLM colocated"] = True
    elif m.device.type == "cuda":
        table.add(case, "TRL, vLLM colocated", "not installed", note="package vllm")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        folder = save_with_tokenizer(model, Path(tmp) / "model") if args.shape in SHAPES else find_folder(args.shape)
        for name, with_vllm in variants.items():
            mine = []
            try:
                theirs, gap, tokens = trl_steps(args, m, folder, tmp, with_vllm,
                                                lambda i, prompts: mine.append(step(i, prompts)))
            except Exception as e:   # their failure is a line of the table
                table.add(case, name, "failed", note=short(e))
                continue
            between = show(f"{case}, in turn with {name}", mine[1:])
            mid = statistics.median(theirs[1:])
            table.add(f"{case}, in turn with {name}", name, mid, "s a step",
                      note=f"ours is {mid / between:.2f} x as fast; prompts of {tokens}; first step {theirs[0]:.1f} s")
            if gap:
                table.add(case, f"{name}: log-prob difference of sampler and trainer, mean", statistics.median(gap),
                          "nats a token")
            free_memory()


def learn_long_rows(args, m, table, model, optimizer, micro):
    """The learning step alone, on rows of 512 tokens of which all but the first are trained."""
    rows, long = args.rows[0], min(512, model.config.max_position_embeddings)
    r = SimpleNamespace(ids=torch.randint(5, model.config.vocab_size, (rows, long)), length=torch.full((rows,), long),
                        logp=torch.zeros(rows, long - 1), mask=(torch.arange(long) > 0).expand(rows, -1))
    took = statistics.median([m.clock(lambda: learn(model, optimizer, r, args.num_generations, micro))[0]
                              for _ in range(args.repeats + 1)][1:])
    flops = learn_flops(model.config, model.num_params(), [long] * rows, rows * (long - 1))
    table.add(f"learning step, {args.shape}, {rows} x {long} tokens", "ours", took, "s", flops / took / m.product,
              f"{flops / 1e12:.4g} TFLOP, {micro} tokens a backward pass")


def agreement(args, m, table, new=128):
    """
    Do sampler and trainer see the same numbers? Mean and largest difference of their log-probs of the sampled tokens,
    the mean ratio (1 for equal distributions), in fp32 and in the dtype of the products; sampled with temperature 0.6,
    1 and 1.3, answers to real problems where the model has a tokenizer; then the trainer against itself: once more, and
    with the rows in another order.
    """
    if args.shape in SHAPES:
        prompts, end = make_prompts(args, SHAPES[args.shape]["vocab_size"], args.rows[0], 0), ()
    else:
        tokenizer, end = common.load_tokenizer(find_folder(args.shape)), None
        prompts = [common.encode_prompt(tokenizer, row["prompt"])
                   for row in get_task("arithmetic").load("train", args.rows[0] // args.num_generations)]
    for dtype in dict.fromkeys((torch.float32, m.dtype)):
        model = make_model(args, SimpleNamespace(device=m.device, dtype=dtype), torch.float32)
        engine, name = Engine(model, slots=args.rows[0]), str(dtype)[6:]
        for temperature in (0.6, 1.0, 1.3):
            r = engine.generate(prompts, args.num_generations, max_new=new, eos_ids=end, temperature=temperature)
            logp, at = common.score(model, r, temperature)[0], r.mask[:, 1:]
            gap = (logp - r.logp)[at]
            table.add(f"log-probs of sampler and trainer, {args.shape}, {name}, temperature {temperature}", "ours",
                      float(gap.abs().mean()), "nats a token", note=f"at most {float(gap.abs().max()):.2g}, mean ratio "
                                                                    f"{float(gap.double().exp().mean()):.6f}")
        order = torch.randperm(len(r.ids), generator=torch.Generator().manual_seed(0))
        mixed = SimpleNamespace(ids=r.ids[order], mask=r.mask[order], length=r.length[order])
        off = float((common.score(model, mixed, temperature)[0] - logp[order]).abs().max())
        table.add(f"log-probs of the trainer, {args.shape}, {name}, scored again", "ours",
                  "bit-equal" if torch.equal(common.score(model, r, temperature)[0], logp) else "not bit-equal",
                  note=f"rows in another order: off by at most {off:.1g}")


def save_with_tokenizer(model, folder):
    """A model of random weights as TRL wants it: with a tokenizer, here one of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = ["<|end|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    t = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.eos_ids = (0,)
    save_model(model, folder, PreTrainedTokenizerFast(tokenizer_object=t, eos_token=words[0], pad_token=words[1]))
    return folder


def trl_steps(args, m, folder, tmp, with_vllm, between):
    """
    TRL's GRPOTrainer on the same prompts, lengths and batch; after each of its steps between(i, prompt ids) runs ours.
    Its weights have the dtype of the products, which is its fastest; no checkpointing, no KL -> seconds of each step,
    mean log-prob differences where it logs them, prompt tokens.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    rows, group, steps = args.rows[0], args.num_generations, args.repeats + 1
    texts = []
    for word in (" the", " of", " and", " in", " to", " is", " for", " as")[:rows // group]:
        texts.append(word * max(1, args.prompt * args.prompt // len(tokenizer(word * args.prompt)["input_ids"])))
    texts = [texts[i % len(texts)] for i in range(rows // group)]
    prompts = [tokenizer(t)["input_ids"] for t in texts]
    seconds, began = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):   # before the trainer samples
            m.sync()
            began.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            m.sync()
            seconds.append(time.perf_counter() - began[-1])
            between(len(seconds), prompts)

    if with_vllm:
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"})
    config = GRPOConfig(
        output_dir=str(Path(tmp) / "trl"), per_device_train_batch_size=rows, num_generations=group, max_steps=steps,
        max_completion_length=args.new, generation_kwargs={"min_tokens" if with_vllm else "min_new_tokens": args.new},
        gradient_checkpointing=False, beta=0.0, learning_rate=1e-6, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, bf16=m.dtype == torch.bfloat16, use_cpu=m.device.type == "cpu",
        model_init_kwargs={"dtype": str(m.dtype)[6:]}, use_vllm=with_vllm, vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=2 * args.prompt + args.new)
    task = Dataset.from_list([{"prompt": t} for t in texts] * steps)
    work = GRPOTrainer(model=str(folder), args=config, train_dataset=task, processing_class=tokenizer,
                       reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
                       callbacks=[Clock()])
    work.remove_callback(PrinterCallback)
    work.train()
    logs = [x for x in work.state.log_history if "completions/mean_length" in x]
    if any(x["completions/mean_length"] != args.new for x in logs):
        raise common.RunError(f"its answers have {logs[0]['completions/mean_length']} tokens, not {args.new}")
    name = "sampling/sampling_logp_difference/mean"
    return seconds, [x[name] for x in logs if name in x], len(prompts[0])


# ----------------------------------------------------------------------------------------------------------------------
# Memory

class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that are held for backward passes, weights apart: now, and at most. `with Kept(model) as k`."""

    def __init__(self, model):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.holders, self.now, self.most = {}, 0, 0
        super().__init__(lambda t: Kept.Held(self, t), lambda held: held.tensor)

    def __enter__(self):
        super().__enter__()
        return self

    class Held:
        def __init__(self, kept, tensor):
            self.kept, self.tensor, place = kept, tensor, tensor.untyped_storage().data_ptr()
            if place not in kept.weights and place not in kept.holders:
                kept.now += tensor.untyped_storage().nbytes()
                kept.most = max(kept.most, kept.now)
            kept.holders[place] = kept.holders.get(place, 0) + 1

        def __del__(self):
            place, storage = self.tensor.untyped_storage().data_ptr(), self.tensor.untyped_storage()
            self.kept.holders[place] -= 1
            if not self.kept.holders[place]:
                del self.kept.holders[place]
                self.kept.now -= storage.nbytes() if place not in self.kept.weights else 0


def plain_head(model, p, scale):
    """-sum scale log pi by autograd alone, all logits of the pack at once -> loss, to be sent backward."""
    logits = common.output_logits(model(p.ids, p.lengths)[p.where], model.head_weight)
    return -(scale * logits.log_softmax(-1).gather(1, p.targets[:, None])[:, 0]).sum()


def chunked_head(model, p, scale):
    """The same by common.head_backward -> loss, its gradient taken already."""
    hidden = model(p.ids, p.lengths)[p.where]

    def fn(logp, entropy, at):
        loss = -(scale[at] * logp).sum()
        return loss, {"loss": loss}
    grad, sums = common.head_backward(hidden, model.head_weight, p.targets, fn)
    hidden.backward(grad)
    return sums["loss"]


#       way of cutting a batch                         pieces  a backward pass each  head        layers recomputed
WAYS = {"whole batch":                                (1,      True,                 plain_head,   False),
        "8 pieces, one backward pass":                (8,      False,                plain_head,   False),
        "8 pieces, a backward pass each":             (8,      True,                 plain_head,   False),
        "the same, chunked head":                     (8,      True,                 chunked_head, False),
        "the same, chunked head, layers recomputed":  (8,      True,                 chunked_head, True)}


def cut(model, ids, mask, length, way):
    """One policy-gradient step on (B, T) rows, cut in one of WAYS -> loss; its gradient is in the weights."""
    pieces, each, head, model.checkpointing = WAYS[way]
    rows = len(ids)
    adv = group_advantage((torch.arange(rows) % 2).float().view(1, -1)).flatten()
    scale = (adv * token_weights("sequence", mask.sum(1), 0)).to(model.device)
    total = 0.0
    for some in torch.arange(rows).chunk(pieces):
        p = common.pack_rows(ids, mask, length, some.tolist(), model.device)
        loss = head(model, p, scale[p.row])
        if each and loss.requires_grad:
            loss.backward()
            loss = loss.detach()
        total = total + loss
    if not each:
        total.backward()
    return float(total.detach())


def three_ways(args, m, table):
    """Equal loss and gradient, and the memory above that of the weights and their gradients."""
    cuda = m.device.type == "cuda"
    rows, long = (64, 512) if cuda else (16, 128)
    model = make_model(args, m, torch.float32)
    ids, length = torch.randint(5, model.config.vocab_size, (rows, long)), torch.full((rows,), long)
    mask, first = (torch.arange(long) >= long // 4).expand(rows, -1), None
    for way in WAYS:
        if WAYS[way][-1] and not cuda:   # what a recomputed layer keeps does not pass the hooks that count here
            table.add(f"{args.shape}, {rows} x {long} tokens", way, "left out", note="needs CUDA")
            continue
        free_memory()
        try:
            cut(model, ids, mask, length, way)   # warm-up; makes the gradients' memory, which stays
            model.zero_grad(set_to_none=False)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                took, loss = m.clock(lambda: cut(model, ids, mask, length, way))
                peak = torch.cuda.max_memory_allocated() - before
            else:
                with Kept(model) as kept:
                    took, loss = m.clock(lambda: cut(model, ids, mask, length, way))
                peak = kept.most
        except torch.OutOfMemoryError as e:
            table.add(f"{args.shape}, {rows} x {long} tokens", way, "out of memory", note=short(e))
            continue
        grad = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
        first = grad if first is None else first
        off = float((grad - first).norm() / first.norm())
        table.add(f"{args.shape}, {rows} x {long} tokens", way, peak / common.GIB,
                  "GiB above the weights" if cuda else "GiB kept for backward",
                  note=f"loss {loss:.6f}, gradient off by {off:.1e}, {took:.3f} s")


def memory(args, m, table):
    three_ways(args, m, table)
    case, rows, group = "full-parameter GRPO step, 1.5b, 8 x 8 samples of 1024", 64, 8
    if m.device.type != "cuda":
        return table.add(case, "ours", "left out", note="needs CUDA")
    work = argparse.Namespace(**{**vars(args), "shape": "1.5b", "new": 1024, "num_generations": group})
    #    layout               optimizer   recompute  tokens  slots
    for name, optim, again, micro, slots in (
            ("for speed",     "adamw",    False,     None,   64),
            ("bf16 weights",  "adamw-sr", False,     16384,  64),
            ("for memory",    "adamw-sr", True,      4096,   32)):
        model = optimizer = engine = r = None   # the one before is gone when the next one is made
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        try:
            model, optimizer, engine = trainer(work, m, optim, slots)
            model.checkpointing, micro = again, micro or micro_tokens(model)
            for i in range(2):   # the second is the one that counts
                roll, r = m.clock(lambda: engine.generate(make_prompts(work, model.config.vocab_size, rows, i), group,
                                                          max_new=work.new, eos_ids=(), seed=i))
                lrn, _ = m.clock(lambda: learn(model, optimizer, r, group, micro))
            table.add(case, name, torch.cuda.max_memory_allocated() / common.GIB, "GiB at most",
                      note=f"rollout {roll:.2f} s, learning {lrn:.2f} s; {common.OPTIMS[optim][0]}; {micro} tokens a "
                           f"backward pass{', layers recomputed' if again else ''}; {slots} slots")
        except torch.OutOfMemoryError as e:
            table.add(case, name, "out of memory", note=short(e))


# ----------------------------------------------------------------------------------------------------------------------
# Sandbox

def sandbox(args, m, table):
    import sandbox as sb
    job = "def add(a, b):\n    return a + b\n", [([1, 2], 3)]
    plain = [sys.executable, "-I", "-S", "-c", "import unittest, json"]

    def latency(go, times):
        return 1000 * statistics.median(m.clock(go)[0] for _ in range(times))

    boxes, rates = {}, {"fresh interpreter": []}
    for tier in ("ns", "landlock"):
        try:
            boxes[tier] = sb.Sandbox(workers=2, tier=tier)
            rates[f"sandbox, tier {tier}"] = []
        except sb.SandboxUnavailable as e:
            table.add("sandbox", f"sandbox, tier {tier}", "not available", note=short(e))
    try:
        for _ in range(args.repeats):
            rates["fresh interpreter"].append(sb.fresh_rate(2, 1.0))
            for tier, box in boxes.items():
                rates[f"sandbox, tier {tier}"].append(sb.rate(box, 1.0))
        fresh = statistics.median(rates["fresh interpreter"])
        for name, found in rates.items():
            mid = statistics.median(found)
            table.add("programs on 2 workers", name, mid, "programs/s", note=f"{mid / fresh:.1f} x a fresh interpreter")
        for tier, box in boxes.items():
            table.add("one program", f"sandbox, tier {tier}", latency(lambda box=box: box.judge(*job), 50), "ms")
        table.add("one program", "fresh interpreter", latency(lambda: subprocess.run(plain, check=True), 10), "ms",
                  note="imports unittest")
    finally:
        for box in boxes.values():
            box.close()
    if not shutil.which("bwrap"):
        return table.add("one program", "bubblewrap", "not installed", note="program bwrap")
    wrapped = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--new-session", "--die-with-parent", *plain]
    try:
        took = latency(lambda: subprocess.run(wrapped, check=True, capture_output=True), 10)
        table.add("one program", "bubblewrap", took, "ms", note="a fresh interpreter inside")
    except subprocess.CalledProcessError as e:
        table.add("one program", "bubblewrap", "failed", note=e.stderr.decode(errors="replace").strip()[:160])


# ----------------------------------------------------------------------------------------------------------------------

def packages():
    """Versions of all that took part or could have."""
    from importlib.metadata import PackageNotFoundError, version
    found = {}
    for name in ("triton", "vllm", "trl", "bitsandbytes", "accelerate", "flashinfer-python", "flash-attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**common.versions(), **found}


class Record:
    """The one labbook record of this call, also where it fails or is stopped: what was measured by then is in it."""

    def __init__(self, args, m, table, found):
        self.args, self.m, self.table, self.found = args, m, table, found

    def write(self, status, notes=""):
        args, m, seconds = self.args, self.m, time.perf_counter() - BEGAN
        peak = round(torch.cuda.max_memory_allocated() / common.GIB, 3) if m.device.type == "cuda" else None
        common.append_record(args.labbook, {
            "kind": "bench", "run_id": f"bench-{args.mode}-{time.strftime('%y%m%d-%H%M%S')}", "parent": None,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "script": "bench", "arm": args.mode, "task": None,
            "model": {"name": args.shape, "sha256": None if args.shape in SHAPES else common.sha256_model(args.shape)},
            "data": [], "seed": 0,
            "config": {**{k: v for k, v in vars(args).items() if k not in ("labbook", "notes")},
                       "device": str(m.device), "dtype": str(m.dtype)[6:], "threads": torch.get_num_threads(),
                       "cores": os.cpu_count()},
            "budget": {"wall_s": round(seconds, 1), "peak_mem_gib": peak}, "losses": {},
            "scores": {"lines": common.finite(self.table.lines)}, "status": status, "git": common.git_state(),
            "versions": self.found, "device": common.device_name(m.device),
            "notes": "; ".join(x for x in (args.notes, notes) if x)},
            f"- {time.strftime('%Y-%m-%d %H:%M')} {status} bench {args.mode} {args.shape} "
            f"({common.device_name(m.device)})")
        return f"{len(self.table.lines)} lines in {seconds:.0f} s, recorded in {args.labbook}"

    def fail(self, text, trace):
        return f" ({self.write('failed', text)})"


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    common.check_writable(args.labbook)
    if args.mode != "sandbox":
        check_shape(args)
    began = time.perf_counter()
    device = common.pick_device("cpu" if args.mode == "cpu" else args.device)
    m = Machine(device, common.pick_precision(args.precision, device), IMPORTS_S + time.perf_counter() - began)
    found = packages()
    print(f"{common.device_name(device)}, {os.cpu_count()} cores, products in {str(m.dtype)[6:]}\n"
          + ", ".join(f"{k} {v or 'not installed'}" for k, v in found.items()))
    table = Table()
    record = Record(args, m, table, found)
    common.fail_in_one_line(record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # a time limit: what was measured is recorded
    if args.mode != "sandbox":
        m.measure()
        table.add("limit of the machine", "copy", m.copy / 1e9, "GB/s", note="bytes read and written")
        table.add("limit of the machine", "matrix product", m.product / 1e12, "TFLOP/s", note=str(m.dtype)[6:])
        free_memory()
    for measure in {"rollout": [rollout], "train": [train], "cpu": [rollout, train], "memory": [memory],
                    "sandbox": [sandbox]}[args.mode]:
        measure(args, m, table)
        free_memory()
    print(f"bench {args.mode}: {record.write('ok')}")
