"""
On-policy self-distillation: the policy answers, and a better informed copy of itself grades every token of the answer.

    L = 1/B sum over the step's B answers y, sum over t of  KL(student(. | x, y_<t), teacher(. | x + hint, y_<t))
    KL(p, q) = sum over the vocabulary of p(v) (log p(v) - log q(v))

The teacher is the frozen start of the run; what it knows beyond the student is the right final answer (not the
reasoning), which stands behind the question in its prompt. Both prompts go through the one chat-template function, and
both models read the same sampled tokens at the same places of the answer. No gradient flows through the sampling, the
hint or the teacher. No reward enters: right and wrong answers are graded alike (reward and right are only recorded).
Any task with an answer key will do. The student's entropy comes from the same pass. Left out: interpolated divergences,
a teacher that follows the student.

Laptop:  python train_opd.py
GPU:     python train_opd.py --model runs/smollm2-gsm8k-sft-s0/checkpoint --task gsm8k --lr 5e-6 --max-steps 200
         (after bash runs/gsm8k_smollm2.sh: as it comes, the model rarely ends an answer)
Ends with a line like  "heldout-same pass@1 0.290 -> 0.367 (greedy 0.833 -> 0.867); ...  252 s  run folder runs/..."
"""
import math
import time
from types import SimpleNamespace

import torch

import common
from common import RunError, UserError, number
from engine import Engine
from envs import get_task, load_pool, load_train, play
from eval_passk import evaluate_splits
from model import find_folder, frozen_copy, load_checkpoint, load_model, save_checkpoint, set_up_lora

# ----------------------------------------------------------------------------------------------------------------------
# Arms: what the teacher is told


def final_answer(row, args):
    """A problem's messages with the hint, which holds the right final answer, behind the last message of the user."""
    i = max((i for i, m in enumerate(row["prompt"]) if m["role"] == "user"), default=None)
    if i is None:
        raise UserError(f"problem {row['id']!r} has no message of the user that the teacher's hint could stand behind")
    content = row["prompt"][i]["content"] + args.hint.replace("{}", str(row["answer"]))
    return [*row["prompt"][:i], {**row["prompt"][i], "content": content}, *row["prompt"][i + 1:]]


ARMS = {"opd": final_answer}

PRESETS = {   # settings only; what is typed wins
    "qwen-1.5b": {"model": "Qwen/Qwen2.5-1.5B-Instruct", "task": "gsm8k", "prompts_per_step": 8, "num_generations": 8,
                  "max_steps": 200, "lr": 1e-6, "max_new": 512, "limit": 100, "eval_n": 32, "eval_every": 25,
                  "eval_other": "math500", "eval_n_other": 16, "limit_other": 133, "eval_kl": True},
}


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--arm", default="opd", choices=ARMS, help="what the teacher is told")
    p.add_argument("--preset", choices=[*PRESETS, "help"], help="settings of a document, as defaults (help: list them)")
    p.add_argument("--hint", default="\n(The answer is {}.)",
                   help="what the teacher reads behind the question, {} is the right answer")
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
    if args.max_steps % args.updates_per_rollout:
        p.error(f"--max-steps {args.max_steps} must be a multiple of --updates-per-rollout {args.updates_per_rollout} "
                f"({max(args.updates_per_rollout, args.max_steps - args.max_steps % args.updates_per_rollout)} works)")
    common.check_lr(p, args, "1e-6")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# The loss

def behind_prompts(r, prompts, n):
    """The answers of a rollout (B rows) behind other prompts, one for n rows: ids, mask (B, T'), length (B,)."""
    length = r.length - r.prompt_length + torch.tensor([len(x) for x in prompts]).repeat_interleave(n)
    ids = torch.zeros(len(length), int(length.max()), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for b, answer in enumerate(zip(r.prompt_length.tolist(), r.length.tolist())):
        prompt = prompts[b // n]
        ids[b, :length[b]] = torch.cat([torch.tensor(prompt), r.ids[b, slice(*answer)]])
        mask[b, len(prompt):length[b]] = r.mask[b, slice(*answer)]
    return SimpleNamespace(ids=ids, mask=mask, length=length)


def opd_loss(logits, logits_teacher, targets, sampler, answers):
    """
    One chunk's loss: logits of both (R, V) at the temperature, targets and sampler (R,): the sampled tokens and the
    log-prob recorded with them, which is only compared; answers: of the whole step. -> summed loss, and summed metrics.
    """
    all_logp, all_teacher = logits.log_softmax(-1), logits_teacher.log_softmax(-1)
    kl = (all_logp.exp() * (all_logp - all_teacher)).sum(-1)                                 # (R,) nats
    loss = kl.sum() / answers
    logp = all_logp.gather(1, targets[:, None])[:, 0]
    return loss, {"mismatch": (logp - sampler).abs().sum(), "tokens": logp.new_tensor(len(logp)), "kl": kl.sum(),
                  "entropy": -(all_logp.exp() * all_logp).sum(), "loss": loss}


# ----------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    hinted = ARMS[args.arm]
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
    sizes = [len(common.encode_prompt(tokenizer, hinted(row, args))) for row in problems]   # the longer of both
    fits = [row for row, size in zip(problems, sizes) if size <= room]
    if not fits:
        raise UserError(f"{source}: with --max-new {args.max_new} no problem fits the context of "
                        f"{model.config.max_position_embeddings} tokens")
    optimizer = common.make_optimizer(model, lr, optim=args.optim, seed=args.seed)
    start = frozen_copy(model)
    engine = Engine(model, tokenizer, slots=args.slots)
    longest = max(size for size in sizes if size <= room) + args.max_new
    common.check_room(run, model, longest, args.prompts_per_step * args.num_generations, args.slots)
    first = 0
    if args.resume:
        state = load_checkpoint(run.folder / "checkpoint", model, optimizer)
        first = run.resumes_at(state, args.max_steps)
    run.start(folder, [source] + [t.path(split) for t, split in held_out], device,
              {"lr": lr, **model.settings()}, adapter)
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
          f"hint {args.hint!r}")
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
        played = play(engine, tokenizer, task, batch, args.num_generations, max_new=args.max_new,
                      temperature=args.temperature, seed=args.seed, step=step, stop=args.stop)
        r = played.rollout
        t1 = time.perf_counter()

        # teacher: the same answers behind prompts that hold the right final answer
        reward = played.right.float()                                           # (N, G), only recorded
        prompts = [common.encode_prompt(tokenizer, hinted(row, args)) for row in batch]
        told = behind_prompts(r, prompts, args.num_generations)
        if step == first:
            for x in (r, told):   # the student's and the teacher's
                print(common.show_row(tokenizer, x.ids[0, :x.length[0]], x.mask[0, :x.length[0]]))

        # update: backward passes over as many rows as fit, then one optimizer step for all of them
        for update in range(args.updates_per_rollout):
            sums = {}
            for group in common.micro_batches(told.length, range(rows_a_step), args.micro_batch_tokens):
                # rows without padding: ids (T,), and of the P trained tokens: where it is scored, target, row, col
                p = common.pack_rows(r.ids, r.mask, r.length, group, device)
                q = common.pack_rows(told.ids, told.mask, told.length, group, device)
                assert torch.equal(p.targets, q.targets)   # the same tokens in the same order
                sampler = common.at_places(r.logp, p)
                hidden = model(p.ids, p.lengths)[p.where]                                    # (P, C)
                with torch.no_grad():
                    hidden_start = start(q.ids, q.lengths)[q.where]
                grad, part = common.head_backward(
                    hidden, model.head_weight, p.targets, lambda z, at: opd_loss(
                        z, common.output_logits(hidden_start[at], start.head_weight) / args.temperature,
                        p.targets[at], sampler[at], rows_a_step), args.temperature, full=True)
                hidden.backward(grad)   # the head is done: from here through the body
                for k, v in part.items():
                    sums[k] = sums.get(k, 0) + float(v)
            grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip))
            if not math.isfinite(grad_norm + sums.get("loss", 0.0)):
                bad = run.folder / f"bad-batch-{step + update + 1}.pt"
                torch.save({"ids": r.ids, "mask": r.mask, "length": r.length, "sums": sums}, bad)
                raise RunError(f"step {step + update + 1}: loss {sums.get('loss')}, gradient norm {grad_norm}: not "
                               f"finite; the batch is in {bad}")
            if update == 0:
                common.check_sampler(step + 1, sums, model, r, args.temperature)
                mismatch = sums.get("mismatch", 0.0) / (sums.get("tokens") or 1)   # later, the policy has moved itself
            for g in optimizer.param_groups:
                g["lr"] = common.lr_at(step + update, args.max_steps, lr, args.warmup, args.schedule)
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
            "entropy": sums["entropy"] / trained, "kl": sums["kl"] / trained,
            "mismatch": mismatch,
            "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"], "loss": sums.get("loss", 0.0),
            "tokens_per_s": tokens / (t1 - t0), "rollout_s": t1 - t0, "learn_s": t2 - t1},
            total=args.max_steps, show=("reward", "no_spread", "truncated", "length", "entropy", "kl", "grad_norm",
                                        "tokens_per_s", "loss"))
        common.append_jsonl(run.folder / "samples.jsonl", [
            {"step": done, "id": batch[b // args.num_generations]["id"], "sample": b % args.num_generations,
             "ids": r.ids[b, :r.length[b]].tolist(), "prompt_length": int(r.prompt_length[b]),
             "mask": r.mask[b, :r.length[b]].int().tolist(), "text": played.texts[b], "finish": r.finish[b],
             "reward": reward.flatten()[b].item(), **played.grades[b]}
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
