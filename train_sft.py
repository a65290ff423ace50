"""
Supervised fine-tuning on given answers: cross-entropy on the answer's tokens and the token that ends it.

    L = - sum over rows, sum over the answer's t of log pi(y_t | x, y_<t)  /  number of answer tokens in the step

Rows are {"prompt": [messages], "completion": [one assistant message]}, or {"messages": [...]}, of which every assistant
turn is trained. Prompts go through the same chat-template function as in every other script and are never trained on.
The denominator is that of the whole step, so that the gradient does not depend on how the step is cut into backward
passes. Rows are packed without padding. With --valid the weights of the lowest validation loss are kept in best/,
beside the last ones in checkpoint/. Left out: several processes.

Laptop:  python train_sft.py --data data/tiny/work/sft.jsonl --lr 1e-3 --max-steps 100
GPU:     python train_sft.py --model data/smollm2 --task gsm8k --data data/gsm8k/sft.jsonl \
             --valid data/gsm8k/sft-valid.jsonl --lr 5e-5 --epochs 2 --rows-per-step 32 --warmup 20
Ends with a line like  "test pass@1 0.001 -> 0.021 (greedy 0.020 -> 0.030); valid loss 0.8556  152 s  run folder ..."
"""
import math
import time

import torch

import common
from common import RunError, UserError, number
from engine import Engine
from envs import check_apart, get_task
from eval_passk import evaluate_splits
from model import find_folder, load_checkpoint, load_model, save_checkpoint, save_weights, set_up_lora


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--data", default=None, help='JSON lines {"prompt", "completion"} or {"messages"}')
    p.add_argument("--valid", default=None, help="rows of the same form whose loss is measured (default: none)")
    p.add_argument("--valid-every", type=number(int, 0), default=25, help="steps between these losses (0: last only)")
    p.add_argument("--max-steps", type=number(int, 0), default=None, help="optimizer steps in all (default: --epochs)")
    p.add_argument("--epochs", type=number(float, high=1e6, above=0), default=1.0,
                   help="passes over the rows, if no --max-steps")
    p.add_argument("--rows-per-step", type=number(int, 1), default=64, help="rows a step")
    p.add_argument("--max-length", type=number(int, 2), default=1024, help="tokens of a row; a longer row is dropped")
    p.add_argument("--min-answer", type=number(int, 0), default=0, help="tokens of an answer; a shorter one is dropped")
    p.add_argument("--micro-batch-tokens", type=number(int, 1), default=16384, help="tokens of one backward pass")
    p.add_argument("--max-new", type=number(int, 1), default=256, help="sampled tokens an answer at most")
    p.add_argument("--stop", nargs="*", default=[], help="strings that end an answer, besides the model's end tokens")
    p.add_argument("--slots", type=number(int, 1), default=64, help="sequences decoded at once")
    p.add_argument("--lr", type=number(float, 0), default=None, help="learning rate (data/tiny: 3e-5, SFT 1e-3)")
    p.add_argument("--warmup", type=number(int, 0), default=5, help="steps of linear warm-up")
    p.add_argument("--schedule", default="cosine", choices=["constant", "linear", "cosine"], help="after warm-up")
    p.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="largest norm of the gradient")
    p.add_argument("--optim", default="adamw", choices=common.OPTIMS,
                   help="fp32 weights; bf16 weights, rounded stochastically; fp32 weights, 8-bit moments")
    common.add_run_flags(p)
    args = common.parse_args(p, argv)
    if args.data is None:   # not required=True: a resumed run has it from its config
        p.error("--data FILE is needed, JSON lines of a prompt and a completion to train on")
    common.refuse_unread(p, args, ("epochs", args.max_steps is None, "no --max-steps"),
                         ("valid_every", args.valid is not None, "--valid"))
    common.check_lr(p, args, "2e-5")
    return args


def sft_loss(logp, entropy, at, total):
    """logp (R,) of the answers' tokens -> their summed negative over the step's number of answer tokens."""
    return -logp.sum() / total, {"loss": -logp.sum(), "entropy": entropy.sum()}


def check_row(row):
    """A textbook row or a chat; ValueError for one without an answer to train on."""
    if "messages" not in row:
        common.check_textbook_row(row)
        if len(row["completion"]) > 1:
            raise ValueError("`completion` has more than one message; a chat goes into `messages`")
        return
    if "prompt" in row or "completion" in row:
        raise ValueError("a row has either `messages` or `prompt` and `completion`")
    common.check_messages(row["messages"], "messages")
    answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    if not answers or not all(a.strip() for a in answers) or row["messages"][0]["role"] == "assistant":
        raise ValueError("`messages` needs an assistant turn, none of them empty and none the first: what is trained "
                         "are answers")


def answer_end(tokenizer, eos_ids):
    """Of the ids that end an answer the one that the chat template writes behind it; the first if it writes none."""
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    try:
        question, whole = common.encode_prompt(tokenizer, chat[:1]), common.encode_prompt(tokenizer, chat)
    except UserError:   # a template for one question
        return eos_ids[0]
    behind = whole[len(question):] if whole[:len(question)] == question else whole
    return next((i for i in behind if i in eos_ids), eos_ids[0])


def encode_row(tokenizer, row, eos_id):
    """
    A row -> lists of ids, in turn read and trained: (prompt, answer) or, for a chat, (prompt, answer, what comes
    between, answer, ...). Each answer is what generation would append to the prompt before it, so that prompt, rendered
    by the template, must begin with all that came before: else ValueError, with the place. Turns behind the last answer
    score nothing and go.
    """
    chat, parts, seen = row.get("messages") or row["prompt"] + row["completion"], [], []
    turns = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
    for i in turns if "messages" in row else [len(row["prompt"])]:   # answers inside a prompt are read
        prompt = common.encode_prompt(tokenizer, chat[:i])
        same = next((k for k, (a, b) in enumerate(zip(seen, prompt)) if a != b), min(len(seen), len(prompt)))
        if same < len(seen):
            raise ValueError(f"the chat template does not keep what came before message {i}: "
                             f"{tokenizer.decode(seen[same:same + 8])!r} becomes "
                             f"{tokenizer.decode(prompt[same:same + 8])!r} (an earlier answer is cut, say); give its "
                             f"answers as rows of prompt and completion")
        parts += [prompt[same:], common.encode_completion(tokenizer, chat[i]["content"], eos_id)]
        seen = prompt + parts[-1]
    return tuple(parts)


def as_batch(rows):
    """Rows of encode_row -> ids and mask (B, T), length (B,); the mask is 1 on the answers alone."""
    length = torch.tensor([sum(map(len, row)) for row in rows])
    ids = torch.zeros(len(rows), int(length.max()), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, :length[i]] = torch.tensor(sum(row, []))
        mask[i, :length[i]] = torch.tensor([k % 2 == 1 for k, part in enumerate(row) for _ in part])
    return ids, mask, length


def padding(rows, args):
    """The share of a step that padding to its longest row would be, over the first epoch."""
    length, used, filled = [sum(map(len, r)) for r in rows], 0, 0
    for step in range(math.ceil(len(rows) / args.rows_per_step)):
        own = [length[i] for i in common.order_at(step, args.rows_per_step, len(rows), args.seed)]
        used, filled = used + sum(own), filled + max(own) * len(own)
    return 1 - used / filled


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
    adapter = set_up_lora(model, folder, args)
    task = get_task(args.task, args.tasks_dir)
    for split in task.splits:   # a malformed row is refused now, not at the evaluation after hours
        task.load(split)
    if not model.eos_ids:
        raise UserError(f"--model {args.model}: no eos_token_id, so that no answer could be taught to end")

    end = answer_end(tokenizer, model.eos_ids)
    longest = min(args.max_length, model.config.max_position_embeddings)

    def encode(path):
        chats, rows = common.read_rows(path, check_row), []
        check_apart([{"id": f"row {i}", "prompt": [m]} for i, row in enumerate(chats, 1)
                     for m in row.get("messages") or row["prompt"] if m["role"] == "user"], path, task)
        for i, row in enumerate(chats, 1):
            try:
                rows.append(encode_row(tokenizer, row, end))
            except (ValueError, UserError) as e:   # the template refuses a role, say
                raise UserError(f"{path}, row {i}: {e}") from e
        fits = [r for r in rows if sum(map(len, r)) <= longest]
        kept = [r for r in fits if min(map(len, r[1::2])) > args.min_answer]   # an answer's end token does not count
        for count, why in [(len(rows) - len(fits), f"longer than {longest} tokens"),
                           (len(fits) - len(kept), f"with an answer under {args.min_answer} tokens")]:
            if count:
                run.note(f"{path}: dropped {count} of {len(rows)} rows, {why}")
        if not fits:
            raise UserError(f"{path}: every row is longer than {longest} tokens (--max-length, or the context)")
        if not kept:
            raise UserError(f"{path}: no row is left with answers of --min-answer {args.min_answer} tokens")
        return kept

    rows = encode(args.data)
    valid = encode(args.valid) if args.valid else []
    steps = math.ceil(args.epochs * len(rows) / args.rows_per_step) if args.max_steps is None else args.max_steps
    optimizer = common.make_optimizer(model, lr, optim=args.optim, seed=args.seed)
    engine = Engine(model, tokenizer, slots=args.slots)
    common.check_room(run, model, max(sum(map(len, r)) for r in rows), args.rows_per_step, args.slots)
    first, best = 0, None   # best: step and loss of the lowest validation
    if args.resume:
        state = load_checkpoint(run.folder / "checkpoint", model, optimizer)
        first, best = run.resumes_at(state, steps), state.get("best")
    run.start(folder, [args.data] + ([args.valid] if valid else []) + [task.path(s) for s in task.splits], device,
              {"lr": lr, "max_steps": steps, **model.settings()}, adapter)
    if args.resume:
        run.restore(first, state["run"])
        run.keep_best(best and best["step"])

    def evaluate():
        return evaluate_splits(engine, tokenizer, task, args.limit, args.eval_n, args.max_new, args.eval_seed,
                               args.stop)

    def save(step):
        state = {"step": step, "run": run.state(), "best": best}
        run.save(step, lambda to: save_checkpoint(to, model, tokenizer, optimizer, state))
        run.keep_best(best and best["step"])

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
                hidden.backward(grad)   # the head is done: from here through the body
            for k, v in part.items():
                sums[k] = sums.get(k, 0) + float(v)
        if not backward:
            optimizer.zero_grad(set_to_none=True)
        return {**{k: v / total for k, v in sums.items()}, "tokens": total}

    print(f"{run.folder}\n{model.describe()} on {common.device_name(device)}, products in "
          f"{str(model.compute_dtype)[6:]}, {common.OPTIMS[args.optim][0]}; {len(rows)} rows, "
          f"{args.rows_per_step} a step, {steps} steps = {steps * args.rows_per_step / len(rows):.2f} epochs, "
          f"lr {lr:g}; packed without padding, which would be {padding(rows, args):.0%} of each step")
    ids, mask, _ = as_batch(rows[:1])
    print(common.show_row(tokenizer, ids[0], mask[0]))
    if args.eval_n and run.evaluation_due(first):
        run.evaluated(first, evaluate())

    # ------------------------------------------------------------------------------------------------------------------
    for step in range(first, steps):
        # update
        t0 = time.perf_counter()
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
        t1 = time.perf_counter()

        # record
        done = step + 1
        run.budget["tokens_trained"] += sums["tokens"]
        lowest = {}
        if valid and (done == steps or common.due(done, args.valid_every)):
            lowest = {"valid_loss": loss_on(valid, backward=False)["loss"]}
            if best is None or lowest["valid_loss"] < best["loss"]:
                best = {"step": done, "loss": lowest["valid_loss"]}
                run.save_best(done, lambda to: save_weights(model, to, tokenizer))
        run.log(done, {"loss": sums["loss"], "entropy": sums["entropy"], "grad_norm": grad_norm,
                       "lr": optimizer.param_groups[0]["lr"], "tokens_per_s": sums["tokens"] / (t1 - t0),
                       "learn_s": t1 - t0, **lowest}, total=steps,
                show=("loss", "valid_loss", "entropy", "grad_norm", "lr", "tokens_per_s"))

        # save, then eval
        last = done == steps or run.stopped
        if last or common.due(done, args.save_every):
            save(done)
        if run.stopped:
            break
        if args.eval_n and not last and common.due(done, args.eval_every):
            run.evaluated(done, evaluate())

    # ------------------------------------------------------------------------------------------------------------------
    valid_loss = run.last.get("valid_loss") or (loss_on(valid, backward=False)["loss"] if valid else None)
    run.losses = {"train": run.last.get("loss"), "valid": valid_loss,
                  **({"valid_lowest": best["loss"], "valid_lowest_step": best["step"]} if best else {})}
    if args.eval_n and not run.stopped:
        run.evaluated(steps, evaluate())
    better = f", lowest {best['loss']:.4f} at step {best['step']} (best/)" if best and best["step"] != steps else ""
    run.finish(f"valid loss {valid_loss:.4f}{better}" if valid else "")
