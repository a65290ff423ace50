"""
Supervised fine-tuning on given answers: cross-entropy on the answer's tokens and the token that ends it.

    L = - sum over rows, sum over the answer's t of log pi(y_t | x, y_<t)  /  number of answer tokens in the step

Rows are {"prompt": [messages], "completion": [one assistant message]}; the prompt goes through the same chat-template
function as in every other script and is never trained on. The denominator is that of the whole step, so that the
gradient does not depend on how the step is cut into backward passes. Left out: padding, several processes.

Laptop:  python train_sft.py --data data/tiny/work/sft.jsonl --lr 1e-3 --max-steps 100
GPU:     python train_sft.py --model data/smollm2 --task gsm8k --data data/gsm8k/sft.jsonl --lr 2e-5 --epochs 2
Ends with a line like  "test pass@1 0.001 -> 0.021 (greedy 0.000 -> 0.040); valid loss 0.8560  158 s  run folder ..."
"""
import math
import time

import torch

import common
from common import RunError, number
from engine import Engine
from envs import get_task
from eval_passk import evaluate_splits
from model import find_folder, load_checkpoint, load_model, save_checkpoint


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--data", default=None, help='JSON lines {"prompt", "completion"} to train on')
    p.add_argument("--valid", default=None, help="rows of the same form whose loss is measured (default: none)")
    p.add_argument("--max-steps", type=number(int, 0), default=None, help="optimizer steps in all (default: --epochs)")
    p.add_argument("--epochs", type=number(float, above=0), default=1.0, help="passes over the rows, if no --max-steps")
    p.add_argument("--rows-per-step", type=number(int, 1), default=64, help="rows a step")
    p.add_argument("--max-length", type=number(int, 2), default=1024, help="tokens of a row; a longer row is dropped")
    p.add_argument("--micro-batch-tokens", type=number(int, 1), default=16384, help="tokens of one backward pass")
    p.add_argument("--max-new", type=number(int, 1), default=256, help="sampled tokens an answer at most")
    p.add_argument("--stop", nargs="*", default=[], help="strings that end an answer, besides the model's end tokens")
    p.add_argument("--slots", type=number(int, 1), default=64, help="sequences decoded at once")
    p.add_argument("--lr", type=number(float, 0), default=None, help="learning rate (default: for data/tiny only)")
    p.add_argument("--warmup", type=number(int, 0), default=5, help="steps of linear warm-up")
    p.add_argument("--schedule", default="cosine", choices=["constant", "linear", "cosine"], help="after warm-up")
    p.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="largest norm of the gradient")
    p.add_argument("--optim", default="adamw", choices=common.OPTIMS,
                   help="fp32 weights; bf16 weights, rounded stochastically; fp32 weights, 8-bit moments")
    common.add_run_flags(p)
    args = common.parse_args(p, argv)
    if args.data is None:   # not required=True: a resumed run has it from its config
        p.error("--data FILE is needed, JSON lines of a prompt and a completion to train on")
    common.refuse_unread(p, args, ("epochs", args.max_steps is None, "no --max-steps"))
    if args.lr is None and not common.is_tiny(args.model):
        p.error(f"--lr has a default for data/tiny only; for {args.model} give --lr (2e-5 is usual for all "
                f"weights of a 0.1B to 2B model)")
    return args


def sft_loss(logp, entropy, at, total):
    """logp (R,) of the answers' tokens -> their summed negative over the step's number of answer tokens."""
    return -logp.sum() / total, {"loss": -logp.sum(), "entropy": entropy.sum()}


def as_batch(rows):
    """Rows (prompt ids, completion ids) -> ids and mask (B, T), length (B,); the mask is 1 on the completion alone."""
    length = torch.tensor([len(x) + len(y) for x, y in rows])
    ids = torch.zeros(len(rows), int(length.max()), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, (x, y) in enumerate(rows):
        ids[i, :len(x) + len(y)] = torch.tensor(x + y)
        mask[i, len(x):len(x) + len(y)] = True
    return ids, mask, length


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    lr = 1e-3 if args.lr is None else args.lr
    run = common.Run(args, "sft")

    device = common.pick_device(args.device)
    folder = find_folder(args.model)
    tokenizer = common.load_tokenizer(folder, args.template)
    model = load_model(folder, common.weight_dtype(args.optim), device,
                       compute_dtype=common.pick_precision(args.precision, device))
    task = get_task(args.task, args.tasks_dir)
    for split in task.splits:   # a malformed row is refused now, not at the evaluation after hours
        task.load(split)
    if not model.eos_ids:
        raise common.UserError(f"--model {args.model}: no eos_token_id, so that no answer could be taught to end")

    longest = min(args.max_length, model.config.max_position_embeddings)

    def encode(path):
        rows = [(common.encode_prompt(tokenizer, row["prompt"]),
                 common.encode_completion(tokenizer, row["completion"][-1]["content"], model.eos_ids[0]))
                for row in common.read_rows(path, common.check_textbook_row)]
        kept = [r for r in rows if len(r[0]) + len(r[1]) <= longest]
        if len(kept) < len(rows):
            print(f"{path}: dropped {len(rows) - len(kept)} of {len(rows)} rows, longer than {longest} tokens")
        if not kept:
            raise common.UserError(f"{path}: every row is longer than {longest} tokens (--max-length, or the context)")
        return kept

    rows = encode(args.data)
    valid = encode(args.valid) if args.valid else []
    steps = math.ceil(args.epochs * len(rows) / args.rows_per_step) if args.max_steps is None else args.max_steps
    optimizer = common.make_optimizer(model, lr, optim=args.optim, seed=args.seed)
    engine = Engine(model, tokenizer, slots=args.slots)
    common.check_room(run, model, max(len(x) + len(y) for x, y in rows), args.rows_per_step, args.slots)
    first = 0
    if args.resume:
        state = load_checkpoint(run.folder / "checkpoint", model, optimizer)
        first = run.resumes_at(state["step"], steps)
    run.start(folder, [args.data] + ([args.valid] if valid else []) + [task.path(s) for s in task.splits], device,
              {"lr": lr, "max_steps": steps})
    if args.resume:
        run.restore(first, state["run"])

    def evaluate():
        return evaluate_splits(engine, tokenizer, task, args.limit, args.eval_n, args.max_new, args.eval_seed,
                               args.stop)

    def save(step):
        run.save(step, lambda to: save_checkpoint(to, model, tokenizer, optimizer, {"step": step, "run": run.state()}))

    def loss_on(rows, backward):
        """Mean loss over the answers' tokens; with `backward` its gradient is left in the weights."""
        ids, mask, length = as_batch(rows)
        total, sums = int(mask.sum()), {}
        for group in common.micro_batches(length, range(len(rows)), args.micro_batch_tokens):
            p = common.pack_rows(ids, mask, length, group, device)
            with torch.set_grad_enabled(backward):
                hidden = model(p.ids, p.lengths)[p.where]                                    # (P, C)
            grad, part = common.head_backward(hidden, model.head_weight, p.targets,
                                              lambda logp, entropy, at: sft_loss(logp, entropy, at, total))
            if backward:
                hidden.backward(grad)
            for k, v in part.items():
                sums[k] = sums.get(k, 0) + float(v)
        if not backward:
            optimizer.zero_grad(set_to_none=True)
        return {**{k: v / total for k, v in sums.items()}, "tokens": total}

    print(f"{run.folder}\n{model.num_params() / 1e6:.2f}M parameters on {common.device_name(device)}, products in "
          f"{str(model.compute_dtype)[6:]}, {common.OPTIMS[args.optim][0]}; {len(rows)} rows, "
          f"{args.rows_per_step} a step, {steps} steps = {steps * args.rows_per_step / len(rows):.2f} epochs, "
          f"lr {lr:g}")
    prompt, completion = rows[0]
    print(common.show_row(tokenizer, prompt + completion, [0] * len(prompt) + [1] * len(completion)))
    if args.eval_n and run.evaluation_due(first):
        run.evaluated(first, evaluate())

    # ------------------------------------------------------------------------------------------------------------------
    for step in range(first, steps):
        # update
        t0 = time.time()
        batch = [rows[i] for i in common.order_at(step, args.rows_per_step, len(rows), args.seed)]
        sums = loss_on(batch, backward=True)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip))
        if not math.isfinite(grad_norm + sums["loss"]):
            bad = run.folder / f"bad-batch-{step + 1}.pt"
            torch.save({"rows": batch, "sums": sums}, bad)
            raise RunError(f"step {step + 1}: loss {sums['loss']}, gradient norm {grad_norm}: not finite; the batch is "
                           f"in {bad}")
        for g in optimizer.param_groups:
            g["lr"] = common.lr_at(step, steps, lr, args.warmup, args.schedule)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        t1 = time.time()

        # record
        done = step + 1
        run.budget["tokens_trained"] += sums["tokens"]
        run.log(done, {"loss": sums["loss"], "entropy": sums["entropy"], "grad_norm": grad_norm,
                       "lr": optimizer.param_groups[0]["lr"], "tokens_per_s": sums["tokens"] / (t1 - t0),
                       "learn_s": t1 - t0}, total=steps, show=("loss", "entropy", "grad_norm", "lr", "tokens_per_s"))

        # save, then eval
        last = done == steps or run.stopped
        if last or common.due(done, args.save_every):
            save(done)
        if run.stopped:
            break
        if args.eval_n and not last and common.due(done, args.eval_every):
            run.evaluated(done, evaluate())

    # ------------------------------------------------------------------------------------------------------------------
    run.losses = {"train": run.last.get("loss"), "valid": loss_on(valid, backward=False)["loss"] if valid else None}
    if args.eval_n and not run.stopped:
        run.evaluated(steps, evaluate())
    run.finish(f"valid loss {run.losses['valid']:.4f}" if valid else "")
