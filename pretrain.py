"""
Pretraining from scratch: the next token of every document, in packs of whole documents.

    L = mean_t -log p(x_t | x_<t)            over all tokens of the step; attention never crosses a document

The model is Llama-shaped with a tied head, initialised as GPT-2 (residual projections 0.02 / sqrt(2 layers)). A
document is {"text": ...} on a line; one longer than --context is cut into pieces. Left out: several processes, token
files on disk, a tokenizer of its own (--tokenizer names a folder).

Laptop:  python data/tiny/prepare.py && python pretrain.py --data data/tiny/work/pretrain.jsonl --max-steps 200
GPU:     python pretrain.py --data data/tiny/work/pretrain.jsonl --max-steps 2400
Ends with a line like  "valid loss 0.412  90 s  run folder runs/pretrain-..."; the model is in RUN/checkpoint.
"""
import math
import time

import torch

import common
from common import RunError, number
from model import llama_config, load_checkpoint, new_model, save_checkpoint


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--data", default="data/tiny/work/pretrain.jsonl", help='JSON lines {"text": ...} to train on')
    p.add_argument("--tokenizer", default="data/tiny/work/tokenizer", help="folder of the tokenizer")
    p.add_argument("--valid-rows", type=number(int, 1), default=512, help="documents held back, the last of the file")
    p.add_argument("--hidden", type=number(int, 1), default=192, help="width of the residual stream")
    p.add_argument("--layers", type=number(int, 1), default=5, help="layers")
    p.add_argument("--heads", type=number(int, 1), default=6, help="query heads")
    p.add_argument("--kv-heads", type=number(int, 1), default=2, help="key/value heads")
    p.add_argument("--ffn", type=number(int, 1), default=512, help="width inside the SwiGLU")
    p.add_argument("--context", type=number(int, 2), default=512, help="tokens of a document at most, and of the model")
    p.add_argument("--max-steps", type=number(int, 0), default=100, help="optimizer steps in all")
    p.add_argument("--batch-tokens", type=number(int, 1), default=8192, help="tokens a step, about (whole documents)")
    p.add_argument("--micro-batch-tokens", type=number(int, 1), default=16384, help="tokens of one backward pass")
    p.add_argument("--lr", type=number(float, 0), default=3e-3, help="learning rate")
    p.add_argument("--weight-decay", type=number(float, 0), default=0.01, help="AdamW's weight decay")
    p.add_argument("--warmup", type=number(int, 0), default=50, help="steps of linear warm-up")
    p.add_argument("--schedule", default="cosine", choices=["constant", "linear", "cosine"], help="after warm-up")
    p.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="largest norm of the gradient")
    common.add_run_flags(p, task=False)
    args = common.parse_args(p, argv)
    for name, whole, part in [("--hidden", args.hidden, args.heads), ("--heads", args.heads, args.kv_heads)]:
        if whole % part:
            p.error(f"{name} {whole} must be a multiple of {part} ({whole // part * part or part} works)")
    return args


def check_text(row):
    if not isinstance(row["text"], str) or not row["text"]:
        raise ValueError(f"`text` must be a text, got {row['text']!r}")


def plan_steps(lengths, steps, tokens, seed):
    """Which documents each step sees: epochs of fresh shuffles, cut into steps of about `tokens` tokens."""
    plan, epoch, queue = [], 0, []
    while len(plan) < steps:
        take, size = [], 0
        while size < tokens:
            if not queue:
                queue = common.order_at(epoch, len(lengths), len(lengths), seed)[::-1]
                epoch += 1
            take.append(queue.pop())
            size += lengths[take[-1]]
        plan.append(take)
    return plan


def next_token_loss(logp, entropy, at, total):
    """logp (R,) of the right next tokens -> their summed negative over the step's number of tokens."""
    return -logp.sum() / total, {"loss": -logp.sum(), "entropy": entropy.sum(), "tokens": logp.new_tensor(len(logp))}


def as_batch(docs):
    """Documents as lists of ids -> ids and mask (B, T), length (B,); every token but a document's first is trained."""
    length = torch.tensor([len(d) for d in docs])
    ids = torch.zeros(len(docs), int(length.max()), dtype=torch.long)
    for i, d in enumerate(docs):
        ids[i, :len(d)] = torch.tensor(d)
    return ids, torch.arange(ids.shape[1]) < length[:, None], length


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    run = common.Run(args, "pretrain")

    device = common.pick_device(args.device)
    tokenizer = common.load_tokenizer(args.tokenizer)
    texts = [row["text"] for row in common.read_rows(args.data, check_text)]
    docs = [ids[i:i + args.context] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
            for i in range(0, len(ids), args.context)]
    docs = [d for d in docs if len(d) > 1]
    if len(docs) <= args.valid_rows:
        raise common.UserError(f"{args.data}: {len(docs)} documents, of which --valid-rows {args.valid_rows} "
                               f"leaves none to train on")
    docs, valid = docs[:-args.valid_rows], docs[-args.valid_rows:]
    model = new_model(llama_config(len(tokenizer), args.hidden, args.layers, args.heads, args.kv_heads, args.ffn,
                                   args.context, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id),
                      args.seed, device)
    model.compute_dtype = common.pick_precision(args.precision, device)
    optimizer = common.make_optimizer(model, args.lr, args.weight_decay)
    longest = max(len(d) for d in docs)
    common.check_room(run, model, longest, args.batch_tokens // longest)
    first = 0
    if args.resume:
        state = load_checkpoint(run.folder / "checkpoint", model, optimizer)
        first = run.resumes_at(state, args.max_steps)
    run.start(None, [args.data], device, model.settings())
    if args.resume:
        run.restore(first, state["run"])

    def save(step):
        run.save(step, lambda to: save_checkpoint(to, model, tokenizer, optimizer, {"step": step, "run": run.state()}))

    def loss_on(docs, backward):
        """Mean loss over the documents; with `backward` its gradient is left in the weights."""
        ids, mask, length = as_batch(docs)
        total, sums = int(length.sum()) - len(docs), {}
        for rows in common.micro_batches(length, range(len(docs)), args.micro_batch_tokens):
            p = common.pack_rows(ids, mask, length, rows, device)
            with torch.set_grad_enabled(backward):
                hidden = model(p.ids, p.lengths)[p.where]
            grad, part = common.head_backward(hidden, model.head_weight, p.targets,
                                              lambda logp, entropy, at: next_token_loss(logp, entropy, at, total))
            if backward:
                hidden.backward(grad)
            for k, v in part.items():
                sums[k] = sums.get(k, 0) + float(v)
        if not backward:
            optimizer.zero_grad(set_to_none=True)
        return {k: v / total for k, v in sums.items() if k != "tokens"} | {"tokens": total}

    plan = plan_steps([len(d) for d in docs], args.max_steps, args.batch_tokens, args.seed)
    tokens = sum(len(d) for d in docs)
    print(f"{run.folder}\n{model.num_params() / 1e6:.2f}M parameters on {common.device_name(device)}, products in "
          f"{str(model.compute_dtype)[6:]}, fp32 masters; {len(docs)} documents of {tokens} tokens, "
          f"{args.max_steps} steps of {args.batch_tokens} = {args.max_steps * args.batch_tokens / tokens:.2f} epochs")
    print(common.show_row(tokenizer, docs[0], [0] + [1] * (len(docs[0]) - 1)))

    # ------------------------------------------------------------------------------------------------------------------
    for step in range(first, args.max_steps):
        # update
        t0 = time.perf_counter()
        sums = loss_on([docs[i] for i in plan[step]], backward=True)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip))
        if not math.isfinite(grad_norm + sums["loss"]):
            bad = run.folder / f"bad-batch-{step + 1}.pt"
            torch.save({"documents": plan[step]}, bad)
            raise RunError(f"step {step + 1}: loss {sums['loss']}, gradient norm {grad_norm}: not finite; the batch is "
                           f"in {bad}")
        for g in optimizer.param_groups:
            g["lr"] = common.lr_at(step, args.max_steps, args.lr, args.warmup, args.schedule)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        t1 = time.perf_counter()

        # record
        done = step + 1
        run.budget["tokens_trained"] += sums["tokens"]
        run.log(done, {"loss": sums["loss"], "entropy": sums["entropy"], "grad_norm": grad_norm,
                       "lr": optimizer.param_groups[0]["lr"], "tokens_per_s": sums["tokens"] / (t1 - t0),
                       "learn_s": t1 - t0},
                total=args.max_steps, show=("loss", "entropy", "grad_norm", "lr", "tokens_per_s"))

        # save
        last = done == args.max_steps or run.stopped
        if last or common.due(done, args.save_every):
            save(done)
        if run.stopped:
            break

    # ------------------------------------------------------------------------------------------------------------------
    run.losses = {"train": run.last.get("loss"), "valid": loss_on(valid, backward=False)["loss"]}
    run.finish(f"valid loss {run.losses['valid']:.4f}")
