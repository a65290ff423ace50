"""
GRPO: sample a group of answers to each problem, and push the policy towards those that beat their group.

    A_i = (r_i - mean(r)) / std(r)                           over the G answers of one problem; std divides by G
    J   = mean_i mean_t min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it
    rho_it = pi(y_it) / pi_old(y_it)                         arXiv 2402.03300, equation 3
    KL_it  = (log pi(y_it) - log pi_start(y_it))^2 / 2       k2, the default; equation 4 is --kl-estimator k3

With one update a rollout (the default) rho is exactly 1 and the clip is inert: the loss is then a policy gradient with
a baseline, its value is near 0 by construction, and what tells that something is learned is the gradient's norm and
the reward. Groups whose answers all have one reward have no advantage and, without a KL term, are not even computed;
they stay in the denominator. No value network, no learned reward, no replay; of DAPO (arXiv 2503.14476) neither a
separate upper eps, nor dynamic sampling, nor the overlong penalty (its mean over tokens is --loss-norm token).

The arms differ in reward and advantage alone:

    grpo                   r = 1 when right, else 0
    grpo_length_penalty    r = 1 - lam L when right, else 0; L = tokens / --max-new. lam < 1, so that a right answer
                           never falls below a wrong one. Where a whole group is right, dividing by the std cancels
                           lam: every strength then gives the same advantages.
    dr_grpo                A = r - mean(r), and a sum over tokens divided by a constant, not by the answer's length:
                           groups that are nearly all right or all wrong weigh no more than others, nor do short
                           answers (arXiv 2503.20783)
    random_reward          controls, which can teach nothing about the problems: a fair coin an answer;
    permuted_reward        the step's rewards, dealt to its answers in a random order;
    format_only            1 when the marked answer can be read, right or not. What they gain, no reward has earned.

Laptop:  python train_grpo.py --arm grpo_length_penalty --lam 0.5
GPU:     python train_grpo.py --model runs/smollm2-gsm8k-sft-s0/checkpoint --task gsm8k --lr 5e-6 --max-steps 200
         (after bash runs/gsm8k_smollm2.sh: a model that is never right has no group with spread, and learns nothing)
Ends with a line like  "heldout-same pass@1 0.290 -> 0.537 (greedy 0.833 -> 0.817); ...  224 s  run folder runs/..."
"""
import argparse
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
# Arms: what is rewarded (N, G), and how a reward becomes an advantage (N, G). played: see envs.py; args: the flags;
# rng: random numbers of the step's own


def reward_right(played, args, rng):
    return played.right.float()


def reward_short(played, args, rng):
    """1 - lam L when right, else 0; L = length / max_new <= 1 (an answer may end on the last token allowed)."""
    return played.right.float() * (1 - args.lam * played.length / args.max_new)


def reward_random(played, args, rng):
    return torch.from_numpy(rng.integers(2, size=played.right.shape)).float()


def reward_permuted(played, args, rng):
    return torch.from_numpy(rng.permutation(played.right.flatten().numpy())).view_as(played.right).float()


def reward_format(played, args, rng):
    return torch.tensor([g["answer"] is not None for g in played.grades]).view_as(played.right).float()


def centred_advantage(reward, args=None):
    """r - mean in each group; exactly 0 where a group has no spread, though the mean of equal floats may be off."""
    spread = (reward != reward[:, :1]).any(1, keepdim=True)
    return torch.where(spread, reward - reward.mean(1, keepdim=True), 0.0)


def group_advantage(reward, args=None):
    """
    (r - mean) / std in each group, the std of its G rewards (divided by G), exactly 0 where a group has no spread.
    reward (N, G); at most sqrt(G - 1).
    """
    centred = centred_advantage(reward)
    return centred / centred.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)


#       arm                    reward            advantage          normalisation of the loss
ARMS = {"grpo":                (reward_right, group_advantage, "sequence"),
        "grpo_length_penalty": (reward_short, group_advantage, "sequence"),
        "dr_grpo":             (reward_right, centred_advantage, "constant"),
        "random_reward":       (reward_random, group_advantage, "sequence"),
        "permuted_reward":     (reward_permuted, group_advantage, "sequence"),
        "format_only":         (reward_format, group_advantage, "sequence")}
ARM_FLAGS = {"lam": ["grpo_length_penalty"]}   # flag without a default -> the arms that need it; others refuse it

PRESETS = {   # settings only; what is typed wins
    "qwen-1.5b": {"model": "Qwen/Qwen2.5-1.5B-Instruct", "task": "gsm8k", "prompts_per_step": 8, "num_generations": 8,
                  "max_steps": 200, "lr": 1e-6, "max_new": 512, "limit": 100, "eval_n": 32, "eval_every": 25,
                  "eval_other": "math500", "eval_n_other": 16, "limit_other": 133, "eval_kl": True},
    "qwen3-1.7b": {"model": "Qwen/Qwen3-1.7B", "task": "arithmetic", "prompts_per_step": 4, "num_generations": 8,
                   "max_steps": 120, "lr": 1e-5, "lora_rank": 16, "beta": 0.04, "kl_estimator": "k3",
                   "max_new": 1024},
}


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--arm", default="grpo", choices=ARMS, help="what is rewarded and compared")
    p.add_argument("--preset", choices=[*PRESETS, "help"], help="settings of a document, as defaults (help: list them)")
    p.add_argument("--lam", type=number(float, 0), help="strength of the length penalty, from 0 to under 1")
    p.add_argument("--eps", type=number(float, above=0, below=1), default=0.2, help="clip of the ratio")
    p.add_argument("--ratio", default="token", choices=["token", "answer"],
                   help="ratio of each token, or geometric mean over the answer (GSPO, arXiv 2507.18071)")
    p.add_argument("--beta", type=number(float, 0), default=None,
                   help="weight of the KL to the start of the run, in nats (default: 0, or what the arm brings)")
    p.add_argument("--kl-estimator", default="k2", choices=["k1", "k2", "k3", "exact"],
                   help="gradient on policy: k2, that of the reverse KL; k1, 0 on average; k3, biased; exact: all of V")
    p.add_argument("--kl-everywhere", action=argparse.BooleanOptionalAction, default=True,
                   help="the KL term acts on groups without spread too")
    p.add_argument("--loss-norm", default=None, choices=["sequence", "token", "constant"],
                   help="mean over tokens, then answers; over all tokens; sum / (answers * max-new) (default: arm's)")
    p.add_argument("--max-steps", type=number(int, 0), default=100, help="optimizer steps in all")
    p.add_argument("--prompts-per-step", type=number(int, 1), default=8, help="problems a rollout")
    p.add_argument("--num-generations", type=number(int, 2), default=8, help="answers a problem, one group")
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
        if not given and args.arm in arms:
            p.error(f"--arm {args.arm} needs {name}: {next(a.help for a in p._actions if a.dest == flag)}")
    if args.lam is not None and args.lam >= 1:
        p.error(f"--lam {args.lam:g} must stay under 1 (0.5 works): from 1 on, a long right answer can score below a "
                f"wrong one, and the policy learns to guess short")
    common.refuse_unread(p, args, ("kl_estimator", args.beta, "--beta above 0"),
                         ("kl_everywhere", args.beta, "--beta above 0"),
                         ("eps", args.updates_per_rollout > 1, "--updates-per-rollout 2 or more"),
                         ("ratio", args.updates_per_rollout > 1, "--updates-per-rollout 2 or more"))
    if args.max_steps % args.updates_per_rollout:
        p.error(f"--max-steps {args.max_steps} must be a multiple of --updates-per-rollout {args.updates_per_rollout} "
                f"({max(args.updates_per_rollout, args.max_steps - args.max_steps % args.updates_per_rollout)} works)")
    common.check_lr(p, args, "1e-6")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# The loss

def token_weights(norm, length, max_new):
    """The weight of each token of each answer (B,), fixed for the whole step. length (B,): sampled tokens."""
    B = len(length)
    if norm == "sequence":
        return 1.0 / (B * length.float())                # mean over an answer's tokens, then over answers
    if norm == "token":
        return torch.full((B,), 1.0 / float(length.sum()))
    return torch.full((B,), 1.0 / (B * max_new))         # Dr. GRPO (arXiv 2503.20783): no division by the length


def policy_loss(logp, logp_old, adv, weight, eps):
    """The clipped surrogate, summed; all (R,), a token each. -> loss, and whether the clip took the gradient (R,)."""
    ratio = (logp - logp_old).exp()
    kept, clipped = ratio * adv, ratio.clamp(1 - eps, 1 + eps) * adv
    return -(weight * torch.minimum(kept, clipped)).sum(), clipped < kept


def kl_terms(estimator, logp, logp_ref):
    """KL(policy, reference) at sampled tokens (R,), nats: http://joschu.net/blog/kl-approx.html (k1, k3: unbiased)"""
    d = logp - logp_ref
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]


@dataclass
class Places:
    """What the loss needs to know of the P trained places of a pack, one entry a place."""
    adv: torch.Tensor
    weight: torch.Tensor
    sampler: torch.Tensor               # log-prob recorded by the sampler: only compared, never in the gradient
    old: torch.Tensor | None = None     # log-prob before the rollout's first update; None: that is now, the ratio is 1
    ref: torch.Tensor | None = None     # log-prob under the start of the run
    answer_log_ratio: torch.Tensor | None = None   # mean over an answer, in place of each token's


def grpo_loss(logp, at, b, args):
    """One chunk's loss: logp (R,) of the places b[at] -> summed loss, and summed metrics."""
    old = logp.detach() if b.old is None else b.old[at]
    if b.answer_log_ratio is not None:   # the answer's ratio in value, this token's share in gradient
        old = logp.detach() - b.answer_log_ratio[at]
    loss, clipped = policy_loss(logp, old, b.adv[at], b.weight[at], args.eps)
    sums = {"clip_frac": clipped.sum(), "mismatch": (logp - b.sampler[at]).abs().sum(),
            "tokens": logp.new_tensor(len(logp))}
    if b.ref is not None:
        kl = kl_terms(args.kl_estimator, logp, b.ref[at])
        loss, sums["kl"] = loss + args.beta * (b.weight[at] * kl).sum(), kl.sum()
    return loss, {**sums, "loss": loss}


def grpo_loss_exact(logits, logits_ref, targets, at, b, args):
    """The same with the KL over the whole vocabulary: logits and logits_ref (R, V) at the temperature."""
    all_logp, all_ref = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    loss, sums = grpo_loss(all_logp.gather(1, targets[:, None])[:, 0], at, b, args)
    kl = (all_logp.exp() * (all_logp - all_ref)).sum(-1)                                     # (R,) nats
    loss = loss + args.beta * (b.weight[at] * kl).sum()
    return loss, {**sums, "kl": kl.sum(), "loss": loss}


# ----------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    make_reward, advantage, arm_norm = ARMS[args.arm]
    norm, beta = args.loss_norm or arm_norm, args.beta or 0.0
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
    exact = beta > 0 and args.kl_estimator == "exact"
    engine = Engine(model, tokenizer, slots=args.slots)
    longest = max(size for size in sizes if size <= room) + args.max_new
    common.check_room(run, model, longest, args.prompts_per_step * args.num_generations, args.slots)
    first = 0
    if args.resume:
        state = load_checkpoint(run.folder / "checkpoint", model, optimizer)
        first = run.resumes_at(state, args.max_steps)
    run.start(folder, [source] + [t.path(split) for t, split in held_out], device,
              {"lr": lr, "beta": beta, "loss_norm": norm, **model.settings()}, adapter)
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
          f"{norm} mean"
          + (", one update a rollout: the ratio is 1 and the clip inert" if args.updates_per_rollout == 1 else ""))
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

        # advantages
        rng = np.random.default_rng([args.seed, step, 1])   # the 1 keeps these apart from those that order problems
        reward = make_reward(played, args, rng)                                 # (N, G)
        adv = advantage(reward, args)                                           # (N, G)
        flat_adv = adv.flatten().to(device)                                     # (B,)
        weight = token_weights(norm, played.length.flatten(), args.max_new).to(device)
        # rows that cannot give a gradient are left out of the backward pass, not of the mean
        rows = (torch.ones_like(adv) if beta and args.kl_everywhere else adv).flatten().nonzero()[:, 0].tolist()
        if step == first:
            shown = rows[0] if rows else 0
            print(common.show_row(tokenizer, r.ids[shown, :r.length[shown]], r.mask[shown, :r.length[shown]]))

        # update: backward passes over as many rows as fit, then one optimizer step for all of them
        # the trainer's own log-probs (B, T - 1), not the sampler's: rounding between the two is no part of the ratio
        logp_old = common.score(model, r, args.temperature)[0] if args.updates_per_rollout > 1 else None
        logp_ref = common.score(start, r, args.temperature)[0] if beta and not exact else None
        for update in range(args.updates_per_rollout):
            answer_log_ratio = None
            if update and args.ratio == "answer":   # log of the geometric mean of the answer's token ratios, (B,)
                now = common.score(model, r, args.temperature)[0]
                answer_log_ratio = ((now - logp_old).sum(1) / r.mask.sum(1)).to(device)
            sums = {}
            for group in common.micro_batches(r.length, rows, args.micro_batch_tokens):
                # rows without padding: ids (T,), and of the P trained tokens: where it is scored, target, row, col
                p = common.pack_rows(r.ids, r.mask, r.length, group, device)
                b = Places(adv=flat_adv[p.row], weight=weight[p.row], sampler=common.at_places(r.logp, p),
                           old=common.at_places(logp_old, p) if update else None, ref=common.at_places(logp_ref, p),
                           answer_log_ratio=None if answer_log_ratio is None else answer_log_ratio[p.row])
                hidden = model(p.ids, p.lengths)[p.where]                                    # (P, C)
                if exact:
                    with torch.no_grad():
                        hidden_start = start(p.ids, p.lengths)[p.where]
                    grad, part = common.head_backward(
                        hidden, model.head_weight, p.targets, lambda z, at: grpo_loss_exact(
                            z, common.output_logits(hidden_start[at], start.head_weight) / args.temperature,
                            p.targets[at], at, b, args), args.temperature, full=True)
                else:
                    grad, part = common.head_backward(
                        hidden, model.head_weight, p.targets, lambda logp, entropy, at: grpo_loss(logp, at, b, args),
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
            if rows:   # no group with spread: no gradient, and momentum alone should not move the weights
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
            "clip_frac": sums.get("clip_frac", 0.0) / trained, "mismatch": mismatch,
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
