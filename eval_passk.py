"""
pass@k of any checkpoint on any task: n samples a problem, the unbiased estimator, its error over problems.

    pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)          n samples, c of them right (arXiv 2107.03374)

The headline reads the marked answer (`#### N`) alone; the lenient reading (last number) stands beside it, so that a
gain in the mark is not taken for a gain in the arithmetic. Standard errors and intervals are over problems, since the
samples of one problem are not independent. The seed of an evaluation is its own: it does not move with training.

    python eval_passk.py --model data/tiny --task arithmetic --split heldout-same --n 32 --k 1 8 32
    python eval_passk.py --model data/smollm2 --task gsm8k --split test --n 4 --limit 32 --max-new 256

The last lines are a table; --out FILE keeps the JSON object, with every sampled answer beside it as FILE.samples.jsonl.
"""
import argparse
import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import common
from common import UserError, number
from engine import Engine
from envs import get_task, load_rows, play
from model import find_folder, load_model


def evaluate(engine, tokenizer, task, rows, n, max_new, ks=None, temperature=1.0, seed=0, greedy=False, stop=()):
    """
    rows: problems. -> (result, samples): the JSON object of the contract, and one dict a sampled answer.
    greedy: temperature 0 and one sample a problem. k > n is a UserError.
    """
    n = 1 if greedy else n
    ks = ks or [2 ** i for i in range(n.bit_length()) if 2 ** i <= n]
    if max(ks) > n:
        raise UserError(f"--k {max(ks)} needs at least as many samples; --n is {n}")
    start = time.time()
    p = play(engine, tokenizer, task, rows, n, max_new=max_new, temperature=temperature, seed=seed, greedy=greedy,
             entropy=True, stop=stop)
    c, lenient_c = p.right.sum(1).tolist(), p.lenient.sum(1).tolist()
    pass_at = {k: [common.pass_at_k(n, x, k) for x in c] for k in ks}
    length = p.length.double()
    right, wrong = p.right, ~p.right
    both = [(length[i][right[i]].mean() - length[i][wrong[i]].mean()).item()
            for i in range(len(rows)) if 0 < c[i] < n]
    sampled = p.rollout.mask[:, 1:]
    answers = [[g["answer"] for g in p.grades[i * n:(i + 1) * n]] for i in range(len(rows))]
    ci = {k: common.interval(v) for k, v in pass_at.items()}
    result = {
        "task": task.name, "n": n, "limit": len(rows), "temperature": 0.0 if greedy else temperature,
        "greedy": greedy, "max_new": max_new, "seed": seed,
        "template_sha256": hashlib.sha256(tokenizer.chat_template.encode()).hexdigest(), "extractor": task.extractor,
        "pass_at": {str(k): float(np.mean(v)) for k, v in pass_at.items()},
        "lenient_pass_at": {str(k): float(np.mean([common.pass_at_k(n, x, k) for x in lenient_c])) for k in ks},
        "se": {str(k): common.mean_and_se(v)[1] for k, v in pass_at.items()},
        "ci95": {str(k): ci[k][:2] for k in ks}, "ci_kind": {str(k): ci[k][2] for k in ks},
        "mean_length": length.mean().item(), "mean_length_right": mean(length[right]),
        "mean_length_wrong": mean(length[wrong]), "median_length_right": mean(length[right], torch.median),
        "length_gap": float(np.mean(both)) if both else None, "truncated": p.truncated.double().mean().item(),
        "entropy": p.rollout.entropy[sampled].double().mean().item(),
        "mean_logp": p.rollout.logp[sampled].double().mean().item(),
        "tokens_per_solved": length.sum().item() / sum(c) if sum(c) else None,
        "distinct_answers": float(np.mean([len(set(a) - {None}) for a in answers])),
        "groups": {"all_right": float(np.mean([x == n for x in c])), "mixed": float(np.mean([0 < x < n for x in c])),
                   "all_wrong": float(np.mean([x == 0 for x in c]))},
        "behaviour": {"parsable": float(np.mean([a is not None for row in answers for a in row])),
                      "finish": dict(Counter(p.rollout.finish))},
        "tokens": int(length.sum()), "wall_s": time.time() - start,
        "problems": [{"id": row["id"], "c": c[i], "n": n, "lenient_c": lenient_c[i], "lengths": p.length[i].tolist(),
                      "correct": p.right[i].tolist(), "answers": answers[i]} for i, row in enumerate(rows)]}
    samples = [{"id": rows[b // n]["id"], "sample": b % n, "text": p.texts[b], "finish": p.rollout.finish[b],
                "right": p.grades[b]["right"], "lenient": p.grades[b]["lenient"],
                "ids": p.rollout.ids[b, :p.rollout.length[b]].tolist(),
                "prompt_length": int(p.rollout.prompt_length[b])} for b in range(len(p.texts))]
    return result, samples


def mean(x, fn=torch.mean):
    return fn(x).item() if x.numel() else None


def evaluate_splits(engine, tokenizer, task, limit, n, max_new, seed, stop=()):
    """
    What a training script runs before and after: every held-out split of the task, sampled, and greedy beside it.
    -> {split: result}.
    """
    results = {}
    for split in task.splits:
        rows = task.load(split, limit)
        result, _ = evaluate(engine, tokenizer, task, rows, n, max_new, seed=seed, stop=stop)
        greedy, _ = evaluate(engine, tokenizer, task, rows, 1, max_new, greedy=True, stop=stop)
        results[split] = {**result, "greedy_pass": greedy["pass_at"]["1"],
                          "lenient_greedy_pass": greedy["lenient_pass_at"]["1"],
                          "greedy_correct": [p["c"] for p in greedy["problems"]]}
    return results


def table(result):
    """The result as lines for the terminal."""
    lines = [f"{result['label'] or result['model']}  {result['task']} {result['split']}: "
             f"{result['limit']} problems x {result['n']} samples, temperature {result['temperature']:g}",
             f"{'k':>5} {'pass@k':>8} {'se':>7} {'95% interval':>17} {'lenient':>8}"]
    for k, v in result["pass_at"].items():
        se, (low, high) = result["se"][k], result["ci95"][k]
        lines.append(f"{k:>5} {v:8.3f} {'-' if se is None else f'{se:.3f}':>7} {f'{low:.3f} to {high:.3f}':>17} "
                     f"{result['lenient_pass_at'][k]:8.3f}")
    g = result["groups"]
    lines.append(f"problems all right {g['all_right']:.2f}, mixed {g['mixed']:.2f}, all wrong {g['all_wrong']:.2f}; "
                 f"answers readable {result['behaviour']['parsable']:.3f}, truncated {result['truncated']:.3f}; "
                 f"{result['mean_length']:.1f} tokens an answer, {result['entropy']:.3f} nats a token; "
                 f"{result['wall_s']:.1f} s")
    return "\n".join(lines)


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", default="data/tiny", help="folder in Hugging Face format, or a hub id like org/name")
    p.add_argument("--task", default="arithmetic", help="task to train and evaluate on (see envs.py)")
    p.add_argument("--tasks-dir", default=None, help="folder of the task files (default: data/TASK)")
    p.add_argument("--split", default=None, help="file of the tasks folder (default: the task's first held-out split)")
    p.add_argument("--tasks", default=None, metavar="FILE", help="a task file, in place of --split")
    p.add_argument("--template", default=None, help="file with a chat template in jinja (default: the tokenizer's)")
    p.add_argument("--n", type=number(int, 1), default=32, help="samples a problem")
    p.add_argument("--k", type=number(int, 1), nargs="+", default=None, help="the k of pass@k (default: 1, 2, 4 .. n)")
    p.add_argument("--limit", type=number(int, 1), default=60, help="problems of each evaluated split, first ones")
    p.add_argument("--max-new", type=number(int, 1), default=256, help="sampled tokens an answer at most")
    p.add_argument("--stop", nargs="*", default=[], help="strings that end an answer, besides the model's end tokens")
    p.add_argument("--temperature", type=number(float, above=0), default=1.0, help="of sampling and log-probs")
    p.add_argument("--seed", type=number(int, 0, 2 ** 63 - 1), default=0, help="seed of the samples")
    p.add_argument("--greedy", action=argparse.BooleanOptionalAction, default=False,
                   help="the most likely token each time, one sample a problem")
    p.add_argument("--slots", type=number(int, 1), default=64, help="sequences decoded at once")
    p.add_argument("--label", default=None, help="name of this row in tables")
    p.add_argument("--out", default=None, metavar="FILE", help="file for the JSON object (samples beside it)")
    p.add_argument("--labbook", default=None, help="file that gets a record of this evaluation")
    p.add_argument("--notes", default="", help="free text for the record")
    p.add_argument("--device", default="auto", help="cuda, mps, cpu, or auto: the first that is there")
    p.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"],
                   help="dtype of the products; master weights are fp32 (auto: bf16 on cuda, fp32 elsewhere)")
    args = common.parse_args(p, argv)
    if args.k and max(args.k) > (1 if args.greedy else args.n):
        p.error(f"--k {max(args.k)} needs at least as many samples; --n is {1 if args.greedy else args.n}")
    if args.tasks and args.split:
        p.error("--tasks FILE takes the place of --split; give one of them")
    for path in (args.out, f"{args.out}.samples.jsonl") if args.out else ():
        if Path(path).exists():
            p.error(f"--out {args.out}: {path} exists; take another name")
    return args


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    start = time.time()
    if args.labbook:
        common.check_writable(args.labbook)
    device = common.pick_device(args.device)
    folder = find_folder(args.model)
    task = get_task(args.task, args.tasks_dir)
    split = args.split or task.splits[0]
    path = Path(args.tasks) if args.tasks else task.path(split)
    rows = load_rows(path, task, args.limit)
    tokenizer = common.load_tokenizer(folder, args.template)
    model = load_model(folder, device=device, compute_dtype=common.pick_precision(args.precision, device))
    engine = Engine(model, tokenizer, slots=args.slots)
    if args.out:   # a place that cannot be written is said before the sampling, not after
        try:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--out {args.out}: cannot be written ({e.strerror}: {Path(args.out).parent})") from e
    result, samples = evaluate(engine, tokenizer, task, rows, args.n, args.max_new, args.k, args.temperature,
                               args.seed, args.greedy, args.stop)
    result = {"model": args.model, "model_sha256": common.sha256_model(folder), "split": Path(path).stem,
              "label": args.label, **result}
    print(table(result))
    if args.out:
        common.append_jsonl(Path(args.out + ".samples.jsonl"), samples)
        common.write_text(args.out, json.dumps(common.finite(result)) + "\n")
        print(f"written to {args.out} and {args.out}.samples.jsonl")
    if args.labbook:
        run = SimpleNamespace(**{k: v for k, v in result.items() if k != "problems"})
        record = {"kind": "eval", "run_id": f"eval-{time.strftime('%y%m%d-%H%M%S')}", "parent": None,
                  "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "script": "eval_passk", "arm": None,
                  "task": task.name, "model": {"name": args.model, "sha256": result["model_sha256"]},
                  "data": [{"path": str(path), "sha256": common.sha256_file(path), "rows": len(rows)}],
                  "seed": args.seed, "config": vars(args),
                  "budget": {"prompts": len(rows), "rollouts": len(samples), "tokens_sampled": result["tokens"],
                             "tokens_trained": 0, "wall_s": round(time.time() - start, 1)},
                  "losses": {}, "scores": common.finite(vars(run)), "status": "ok", "git": common.git_state(),
                  "versions": common.versions(), "device": common.device_name(device), "notes": args.notes}
        common.append_record(args.labbook, record,
                             f"- {time.strftime('%Y-%m-%d %H:%M')} eval {args.label or args.model} {task.name} "
                             f"{result['split']}: pass@1 {result['pass_at'].get('1', float('nan')):.3f}")
