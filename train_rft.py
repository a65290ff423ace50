"""
Rejection sampling fine-tuning: sample a group of answers to each problem, keep one of the right ones, and train on it
by plain cross-entropy. Nothing is pushed away, and wrong answers are never looked at.

    L = 1/K sum over kept answers y, sum over t of  - log pi(y_t | x, y_<t)  +  beta KL(pi, start at x, y_<t)

K: the answers kept in the step. A problem without a right answer is skipped, and counted (`skipped`). The brake is the
exact KL over the whole vocabulary, at the tokens that are trained anyway; without it (beta 0) a step is one of
train_sft.py on the model's own answers. No value network, no learned reward, no replay.

The arms differ in the answer that is kept, and in the brake:

    rft_shortest           the shortest right answer, the first of equals
    rft_shortest_braked    the same, and beta = 0.05; nothing else differs
    rft_random             any right answer: what the shortest does beyond it is due to its length

Laptop:  python train_rft.py --arm rft_shortest_braked
GPU:     python train_rft.py --model runs/smollm2-gsm8k-sft-s0/checkpoint --task gsm8k --lr 5e-6 --max-steps 200
         (after bash runs/gsm8k_smollm2.sh: a model that is never right has nothing to keep)
Ends with a line like  "heldout-same pass@1 0.290 -> 0.563 (greedy 0.833 -> 0.800); ...  108 s  run folder runs/..."
"""
import math
import time
from dataclasses import dataclass

import numpy as np
import torch

import common
from common import RunError, UserError, number
from engine import Engine
from envs import get_task, load_pool, load_train, play
from eval_passk import evaluate_splits
from model import find_folder, frozen_copy, load_checkpoint, load_model, save_checkpoint, set_up_lora

# ----------------------------------------------------------------------------------------------------------------------
# Arms: the order in which a problem's answers are preferred (N, G). played: see envs.py; rng: random numbers of the
# step's own


def shortest_first(played, rng):
    return played.length.float()


def any_order(played, rng):
    return torch.from_numpy(rng.random(played.length.shape))


def keep_first(order, right):
    """(N, G) -> (N, G) bool: of each problem's right answers the first in `order`, ties by index; none without any."""
    first = torch.where(right, order, math.inf).argmin(1, keepdim=True)
    return torch.zeros_like(right).scatter(1, first, True) & right


#       arm                    kept            beta
ARMS = {"rft_shortest":        (shortest_first, 0.0),
        "rft_shortest_braked": (shortest_first, 0.05),
        "rft_random":          (any_order, 0.0)}
ARM_FLAGS = {"beta": ["rft_shortest_braked"]}   # flag without a default -> the arms that read it; others refuse it

PRESETS = {   # settings only; what is typed wins
    "qwen-1.5b": {"model": "Qwen/Qwen2.5-1.5B-Instruct", "task": "gsm8k", "prompts_per_step": 8, "num_generations": 8,
                  "max_steps": 200, "lr": 1e-6, "max_new": 512, "limit": 100, "eval_n": 32, "eval_every": 25,
                  "eval_other": "math500", "eval_n_other": 16, "limit_other": 133, "eval_kl": True},
}


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--arm", default="rft_shortest", choices=ARMS, help="which answer is kept, and the brake")
    p.add_argument("--preset", choices=[*PRESETS, "help"], help="settings of a document, as defaults (help: list them)")
    p.add_argument("--beta", type=number(float, 0), default=None,
                   help="weight of the KL to the start of the run, in nats (default: 0, or what the arm brings)")
    p.add_argument("--max-steps", type=number(int, 0), default=100, help="optimizer steps in all")
    p.add_argument("--prompts-per-step", type=number(int, 1), default=8, help="problems a rollout")
    p.add_argument("--num-generations", type=number(int, 1), default=8, help="answers a problem, one group")
    p.add_argument("--updates-per-rollout", type=number(int, 1), default=1, help="optimizer steps on each rollout")
    p.add_argument("--micro-batch-tokens", type=number(int, 1), default=16384, help="tokens of one backward pass")
    p.add_argument("--max-new", type=number(int, 1), default=256, help="sampled tokens an answer at most")
    p.add_argument("--stop", nargs="*", default=[], help="strings that end an answer, besides the model's end tokens")
    p.add_argument("--temperature", type=number(float, above=0), default=1.0, help="of sampling and log-probs")
    p.add_argument("--slots", type=number(int, 1), default=64, help="sequences decoded at once")
    p.add_argument("--lr", type=number(float, 0), default=None, help="learning rate (data/tiny: 3e-5, SFT 1e-3)")
    p.add_argument("--warmup", type=number(int, 0), default=5, help="steps of linear warm-up")
    p.add_argument("--schedule", default="constant", choices=["constant", "linear", "cosine"], help="after warm-up")
    p.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="largest norm of the gradient")
    p.add_argument("--optim", default="adamw", choices=common.OPTIMS,
                   help="fp32 weights; bf16 weights, rounded stochastically; fp32 weights, 8-bit moments")
    common.add_run_flags(p, pool=True)
    args = common.parse_args(p, argv, PRESETS)
    for flag, arms in ARM_FLAGS.items():
        name, given = f"--{flag.replace('_', '-')}", getattr(args, flag) is not None
        if given and args.arm not in arms:
            p.error(f"{name} is read by --arm {' and '.join(arms)}, not by {args.arm}")
    if args.max_steps % args.updates_per_rollout:
        p.error(f"--max-steps {args.max_steps} must be a multiple of --updates-per-rollout {args.updates_per_rollout} "
                f"({max(args.updates_per_rollout, args.max_steps - args.max_steps % args.updates_per_rollout)} works)")
    common.check_lr(p, args, "1e-6")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# The loss

@dataclass
class Places:
    """What the loss needs to know of the P trained places of a pack, one entry a place."""
    adv: torch.Tensor
    weight: torch.Tensor
    sampler: torch.Tensor               # log-prob recorded by the sampler: only compared, never in the gradient


def rft_loss(logp, at, b):
    """One chunk's loss: logp (R,) of the places b[at] -> summed loss, and summed metrics."""
    loss = -(b.weight[at] * b.adv[at] * logp).sum()
    sums = {"mismatch": (logp - b.sampler[at]).abs().sum(), "tokens": logp.new_tensor(len(logp))}
    return loss, {**sums, "loss": loss}


def rft_loss_exact(logits, logits_ref, targets, at, b, beta):
    """The same with the KL over the whole vocabulary: logits and logits_ref (R, V) at the temperature."""
    all_logp, all_ref = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    loss, sums = rft_loss(all_logp.gather(1, targets[:, None])[:, 0], at, b)
    kl = (all_logp.exp() * (all_logp - all_ref)).sum(-1)                                     # (R,) nats
    loss = loss + beta * (b.weight[at] * kl).sum()
    return loss, {**sums, "kl": kl.sum(), "loss": loss}


# ----------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    make_order, arm_beta = ARMS[args.arm]
    beta = arm_beta if args.beta is None else args.beta
    lr = 3e-5 if args.lr is None else args.lr
    run = common.Run(args, args.arm)

    device = common.pick_device(args.device)
    folder = find_folder(args.model)
    tokenizer = common.load_tokenizer(folder, args.template)
    model = load_model(folder, common.weight_dtype(args.optim), device,
                       compute_dtype=common.pick_precision(args.precision, device))
    adapter = set_up_lora(model, folder, args)
    task = get_task(args.task, args.tasks_dir)
    other = get_task(args.eval_other) if args.eval_other else None
    source = args.pool or task.path(task.train)
    problems = load_pool(source, task, tokenizer, folder, args.any_pool, adapter) if args.pool else load_train(task)
    held_out = [(t, split) for t in (task, other) if t for split in t.splits]
    for t, split in held_out:   # a malformed row is refused now, not at the evaluation after hours
        t.load(split)
    room = model.config.max_position_embeddings - args.max_new
    sizes = [len(common.encode_prompt(tokenizer, row["prompt"])) for row in problems]
    fits = [row for row, size in zip(problems, sizes) if size <= room]
    if not fits:
        raise UserError(f"{source}: with --max-new {args.max_new} no problem fits the context of "
                        f"{model.config.max_position_embeddings} tokens")
    optimizer = common.make_optimizer(model, lr, optim=args.optim, seed=args.seed)
    start = frozen_copy(model) if beta or args.eval_kl else None
    exact = beta > 0   # the brake is the exact KL
    engine = Engine(model, tokenizer, slots=args.slots)
    longest = max(size for size in sizes if size <= room) + args.max_new
    common.check_room(run, model, longest, args.prompts_per_step * args.num_generations, args.slots)
    first = 0
    if args.resume:
        state = load_checkpoint(run.folder / "checkpoint", model, optimizer)
        first = run.resumes_at(state, args.max_steps)
    run.start(folder, [source] + [t.path(split) for t, split in held_out], device,
              {"lr": lr, "beta": beta, **model.settings()}, adapter)
    if args.resume:
        run.restore(first, state["run"])

    def evaluate():
        return evaluate_splits(engine, tokenizer, task, args.limit, args.eval_n, args.max_new, args.eval_seed,
                               args.stop, other, args.limit_other, args.eval_n_other, start if args.eval_kl else None)

    def save(step):
        run.save(step, lambda to: save_checkpoint(to, model, tokenizer, optimizer, {"step": step, "run": run.state()}))

    rows_a_step = args.prompts_per_step * args.num_generations
    print(f"{run.folder}\n{model.describe()} on {common.device_name(device)}, products in "
          f"{str(model.compute_dtype)[6:]}, {common.OPTIMS[args.optim][0]}; {len(fits)} problems, "
          f"{args.prompts_per_step} x {args.num_generations} = {rows_a_step} answers a step, lr {lr:g}, "
          f"beta {beta:g}")
    if len(fits) < len(problems):   # refused and counted, never cut: the end of a prompt is its question
        run.note(f"refused {len(problems) - len(fits)} of {len(problems)} problems: with --max-new {args.max_new} "
                 f"their prompts do not fit the context of {model.config.max_position_embeddings} tokens")
    if args.eval_n and run.evaluation_due(first):
        run.evaluated(first, evaluate())

    # ------------------------------------------------------------------------------------------------------------------
    for step in range(first, args.max_steps, args.updates_per_rollout):
        # rollout: N problems, G answers each
        t0 = time.perf_counter()
        batch = [fits[i] for i in common.order_at(step // args.updates_per_rollout, args.prompts_per_step, len(fits),
                                                  args.seed)]
        played = play(engine, tokenizer, task, batch, args.num_generations, max_new=args.max_new, entropy=True,
                      temperature=args.temperature, seed=args.seed, step=step, stop=args.stop)
        r = played.rollout
        t1 = time.perf_counter()

        # advantages: 1 for the answer that is kept, 0 for the others
        rng = np.random.default_rng([args.seed, step, 1])   # the 1 keeps these apart from those that order problems
        reward = played.right.float()                                           # (N, G)
        adv = keep_first(make_order(played, rng), played.right).float()         # (N, G)
        flat_adv = adv.flatten().to(device)                                     # (B,)
        rows = adv.flatten().nonzero()[:, 0].tolist()
        weight = torch.full((rows_a_step,), 1 / max(1, len(rows)), device=device)   # one denominator a step
        if step == first:
            shown = rows[0] if rows else 0
            print(common.show_row(tokenizer, r.ids[shown, :r.length[shown]], r.mask[shown, :r.length[shown]]))

        # update: backward passes over as many rows as fit, then one optimizer step for all of them
        for update in range(args.updates_per_rollout):
            sums = {}
            for group in common.micro_batches(r.length, rows, args.micro_batch_tokens):
                # rows without padding: ids (T,), and of the P trained tokens: where it is scored, target, row, col
                p = common.pack_rows(r.ids, r.mask, r.length, group, device)
                b = Places(adv=flat_adv[p.row], weight=weight[p.row], sampler=common.at_places(r.logp, p))
                hidden = model(p.ids, p.lengths)[p.where]                                    # (P, C)
                if exact:
                    with torch.no_grad():
                        hidden_start = start(p.ids, p.lengths)[p.where]
                    grad, part = common.head_backward(
                        hidden, model.head_weight, p.targets, lambda z, at: rft_loss_exact(
                            z, common.output_logits(hidden_start[at], start.head_weight) / args.temperature,
                            p.targets[at], at, b, beta), args.temperature, full=True)
                else:
                    grad, part = common.head_backward(
                        hidden, model.head_weight, p.targets, lambda logp, entropy, at: rft_loss(logp, at, b),
                        args.temperature)
                hidden.backward(grad)   # the head is done: from here through the body
                for k, v in part.items():
                    sums[k] = sums.get(k, 0) + float(v)
            grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip))
            if not math.isfinite(grad_norm + sums.get("loss", 0.0)):
                bad = run.folder / f"bad-batch-{step + update + 1}.pt"
                torch.save({"ids": r.ids, "mask": r.mask, "length": r.length, "adv": adv, "sums": sums}, bad)
                raise RunError(f"step {step + update + 1}: loss {sums.get('loss')}, gradient norm {grad_norm}: not "
                               f"finite; the batch is in {bad}")
            if update == 0:
                common.check_sampler(step + 1, sums, model, r, args.temperature)
                mismatch = sums.get("mismatch", 0.0) / (sums.get("tokens") or 1)   # later, the policy has moved itself
            for g in optimizer.param_groups:
                g["lr"] = common.lr_at(step + update, args.max_steps, lr, args.warmup, args.schedule)
            if rows:   # no right answer: no gradient, and momentum alone should not move the weights
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        t2 = time.perf_counter()

        # record
        done = step + args.updates_per_rollout
        tokens, trained = int(played.length.sum()), sums.get("tokens", 0) or 1
        run.budget["prompts"] += args.prompts_per_step
        run.budget["rollouts"] += rows_a_step
        run.budget["tokens_sampled"] += tokens
        run.budget["tokens_trained"] += int(sums.get("tokens", 0)) * args.updates_per_rollout
        run.losses = {"last": sums.get("loss")}
        run.log(done, {
            "reward": reward.mean().item(), "right": played.right.float().mean().item(),
            "lenient": played.lenient.float().mean().item(),
            "no_spread": (reward == reward[:, :1]).all(1).float().mean().item(),
            "truncated": played.truncated.float().mean().item(), "length": tokens / rows_a_step,
            "entropy": r.entropy[r.mask[:, 1:]].mean().item(), "kl": sums["kl"] / trained if "kl" in sums else None,
            "skipped": int((adv == 0).all(1).sum()), "mismatch": mismatch,
            "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"], "loss": sums.get("loss", 0.0),
            "tokens_per_s": tokens / (t1 - t0), "rollout_s": t1 - t0, "learn_s": t2 - t1},
            total=args.max_steps, show=("reward", "no_spread", "truncated", "length", "entropy", "kl", "grad_norm",
                                        "tokens_per_s", "loss"))
        common.append_jsonl(run.folder / "samples.jsonl", [
            {"step": done, "id": batch[b // args.num_generations]["id"], "sample": b % args.num_generations,
             "ids": r.ids[b, :r.length[b]].tolist(), "prompt_length": int(r.prompt_length[b]),
             "mask": r.mask[b, :r.length[b]].int().tolist(), "text": played.texts[b], "finish": r.finish[b],
             "reward": reward.flatten()[b].item(), "adv": flat_adv[b].item(), **played.grades[b]}
            for b in range(rows_a_step)])

        # save, then eval
        last = done >= args.max_steps or run.stopped
        if last or common.due(done, args.save_every, args.updates_per_rollout):
            save(done)
        if run.stopped:
            break
        if args.eval_n and not last and common.due(done, args.eval_every, args.updates_per_rollout):
            run.evaluated(done, evaluate())

    # ------------------------------------------------------------------------------------------------------------------
    if args.eval_n and not run.stopped:
        run.evaluated(args.max_steps, evaluate())
    run.finish()
