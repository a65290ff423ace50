"""
pass@k of any checkpoint on any task: n samples a problem, the unbiased estimator, its error over problems.

    pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)          n samples, c of them right (arXiv 2107.03374)

The headline reads the marked answer (`#### N`) alone; the lenient reading (last number) stands beside it, so that a
gain in the mark is not taken for a gain in the arithmetic. Standard errors and intervals are over problems, since the
samples of one problem are not independent. The seed of an evaluation is its own: it does not move with training.

    python eval_passk.py --model data/tiny --task arithmetic --split heldout-same --n 32 --k 1 8 32
    python eval_passk.py --model data/smollm2 --task gsm8k --split test --n 4 --limit 32 --max-new 256
    python eval_passk.py --model data/tiny --adapter runs/RUN       the base with a run's adapter (--lora-rank)

The last lines are a table; --out FILE keeps the JSON object, with every sampled answer beside it as FILE.samples.jsonl.

A pool of problems that a model solves now and then, since those it always or never solves teach a group nothing:

    python eval_passk.py --split train --keep 1 7 --pool-out pool.jsonl --n 8 --limit 2000
    python train_grpo.py --pool pool.jsonl

The pool is written once, read-only, with its hash, the model's and the counts in pool.jsonl.meta.json. Its base rate is
flattered by the choice (regression to the mean): the command that measures it with fresh samples is printed.
"""
import argparse
import json
import os
import shlex
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import common
from common import UserError, number
from engine import Engine
from envs import check_apart, get_task, load_rows, play
from model import find_folder, load_model, set_up_lora


def evaluate(engine, tokenizer, task, rows, n, max_new, ks=None, temperature=1.0, seed=0, greedy=False, stop=(),
             start=None, step=0):
    """
    rows: problems. -> (result, samples): the JSON object of the contract, and one dict a sampled answer.
    greedy: temperature 0 and one sample a problem. k > n is a UserError. start: a frozen model; the result's `kl` is
    then the mean over sampled tokens of logp - logp_start, which estimates KL(policy, start) in nats a token. step:
    other samples of the same seed.
    """
    n = 1 if greedy else n
    ks = ks or [2 ** i for i in range(n.bit_length()) if 2 ** i <= n]
    if max(ks) > n:
        raise UserError(f"--k {max(ks)} needs at least as many samples; --n is {n}")
    began = time.monotonic()
    p = play(engine, tokenizer, task, rows, n, max_new=max_new, temperature=temperature, seed=seed, step=step,
             greedy=greedy, entropy=True, stop=stop)
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
        "top_p": 1.0,   # the engine samples from the whole distribution
        "greedy": greedy, "max_new": max_new, "seed": seed,
        "template_sha256": common.template_sha256(tokenizer), "extractor": task.extractor,
        "pass_at": {str(k): float(np.mean(v)) for k, v in pass_at.items()},
        "lenient_pass_at": {str(k): float(np.mean([common.pass_at_k(n, x, k) for x in lenient_c])) for k in ks},
        "se": {str(k): common.mean_and_se(v)[1] for k, v in pass_at.items()},
        "ci95": {str(k): ci[k][:2] for k in ks}, "ci_kind": {str(k): ci[k][2] for k in ks},
        "mean_length": length.mean().item(), "mean_length_right": mean(length[right]),
        "mean_length_wrong": mean(length[wrong]), "median_length_right": mean(length[right], torch.median),
        "length_gap": float(np.mean(both)) if both else None, "truncated": p.truncated.double().mean().item(),
        "entropy": p.rollout.entropy[sampled].double().mean().item(),
        "mean_logp": p.rollout.logp[sampled].double().mean().item(),
        "kl": None if start is None else kl_to_start(p.rollout, start, temperature),
        "tokens_per_solved": length.sum().item() / sum(c) if sum(c) else None,
        "distinct_answers": float(np.mean([len(set(a) - {None}) for a in answers])),
        "groups": {"all_right": float(np.mean([x == n for x in c])), "mixed": float(np.mean([0 < x < n for x in c])),
                   "all_wrong": float(np.mean([x == 0 for x in c]))},
        "behaviour": {"parsable": float(np.mean([a is not None for row in answers for a in row])),
                      "finish": dict(Counter(p.rollout.finish))},
        "tokens": int(length.sum()), "wall_s": time.monotonic() - began,
        "problems": [{"id": row["id"], "c": c[i], "n": n, "lenient_c": lenient_c[i], "lengths": p.length[i].tolist(),
                      "correct": p.right[i].tolist(), "answers": answers[i]} for i, row in enumerate(rows)]}
    samples = [{"id": rows[b // n]["id"], "sample": b % n, "text": p.texts[b], "finish": p.rollout.finish[b],
                "right": p.grades[b]["right"], "lenient": p.grades[b]["lenient"],
                "ids": p.rollout.ids[b, :p.rollout.length[b]].tolist(),
                "prompt_length": int(p.rollout.prompt_length[b])} for b in range(len(p.texts))]
    return result, samples


def mean(x, fn=torch.mean):
    return fn(x).item() if x.numel() else None


# ----------------------------------------------------------------------------------------------------------------------
# Screening

HEADROOM = {"problems": 60, "n": 32, "pass@1 at most": 0.95, "pass@32 at least": 0.05}
SCREENING = 1 << 30   # the step of its samples: no training step of the same seed draws them again


def check_headroom(result, where):
    """UserError with the numbers for a task on which a model has nothing to learn, or nothing to learn from."""
    at, g = result["pass_at"], result["groups"]
    numbers = (f"{where}: {result['limit']} problems x {result['n']}: pass@1 {at['1']:.3f}, pass@8 {at['8']:.3f}, "
               f"pass@32 {at['32']:.3f}; problems all right {g['all_right']:.2f}, mixed {g['mixed']:.2f}, all wrong "
               f"{g['all_wrong']:.2f}")
    print(f"headroom: {numbers}", flush=True)
    if at["1"] > HEADROOM["pass@1 at most"]:
        raise UserError(f"{numbers}: pass@1 is over {HEADROOM['pass@1 at most']}, there is no room to improve; take "
                        f"harder problems")
    if at["32"] < HEADROOM["pass@32 at least"]:
        raise UserError(f"{numbers}: pass@32 is under {HEADROOM['pass@32 at least']}, there is next to nothing to "
                        f"learn from; take easier problems, or a supervised warm start (train_sft.py)")


def screen(sample, rows, keep, each=250):
    """sample(rows) -> result of evaluate(). -> (rows with keep[0] to keep[1] right answers, all counts, tokens)."""
    counts, tokens = [], 0
    for i in range(0, len(rows), each):   # one line of progress for each of these
        result = sample(rows[i:i + each])
        counts += [p["c"] for p in result["problems"]]
        tokens += result["tokens"]
        kept = [row for row, c in zip(rows, counts) if keep[0] <= c <= keep[1]]
        print(f"screened {len(counts)} of {len(rows)}, kept {len(kept)}", flush=True)
    return kept, counts, tokens


def write_pool(path, rows, meta):
    """The pool and PATH.meta.json with its hash; read-only, since every arm of a study must read the same problems."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    common.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    meta = {"sha256": common.sha256_file(path), **meta}
    common.write_json(f"{path}.meta.json", meta)
    for name in (path, f"{path}.meta.json"):
        os.chmod(name, 0o444)
    return meta


# ----------------------------------------------------------------------------------------------------------------------

def kl_to_start(rollout, start, temperature):
    logp_start, sampled = common.score(start, rollout, temperature)[0], rollout.mask[:, 1:]
    return (rollout.logp - logp_start)[sampled].double().mean().item()


def evaluate_splits(engine, tokenizer, task, limit, n, max_new, seed, stop=(), other=None, limit_other=None,
                    n_other=None, start=None):
    """
    What a training script runs before and after: every held-out split of the task, sampled, and greedy beside it, then
    those of the task `other`. n_other counts for all but the first split, limit_other for the other task.
    -> {split: result}, the other task's as "TASK-SPLIT"; `samples` in it are all sampled answers.
    """
    results = {}
    for t, split in [(task, split) for split in task.splits] + ([(other, s) for s in other.splits] if other else []):
        rows = t.load(split, limit if t is task else limit_other or limit)
        samples = n if not results else n_other or n
        print(f"evaluating {t.name} {split}: {len(rows)} problems x {samples} samples, and greedy", flush=True)
        result, answers = evaluate(engine, tokenizer, t, rows, samples, max_new, seed=seed, stop=stop, start=start)
        greedy, _ = evaluate(engine, tokenizer, t, rows, 1, max_new, greedy=True, stop=stop)
        results[split if t is task else f"{t.name}-{split}"] = {
            **result, "greedy_pass": greedy["pass_at"]["1"], "lenient_greedy_pass": greedy["lenient_pass_at"]["1"],
            "greedy_correct": [p["c"] for p in greedy["problems"]], "samples": answers}
    return results


def table(result):
    """The result as lines for the terminal."""
    model = result["model"] + (f" --adapter {result['adapter']}" if result.get("adapter") else "")
    lines = [f"{result['label'] or model}  {result['task']} {result['split']}: "
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


def again(args, rows):
    """The command that measures the base rate of a pool of `rows` problems anew, all else as in its screening."""
    words = ["--model", args.model, *(["--adapter", args.adapter] if args.adapter else []), "--task", args.task,
             "--tasks", args.pool_out, "--limit", rows, "--n", args.n, "--k", 1, "--max-new", args.max_new, "--seed",
             args.seed + 1, "--temperature", args.temperature]
    words += (["--template", args.template] if args.template else []) + (["--stop", *args.stop] if args.stop else [])
    return shlex.join(["python", "eval_passk.py", *map(str, words)])


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", default="data/tiny", help="folder in Hugging Face format, or a hub id like org/name")
    p.add_argument("--adapter", default=None, metavar="PATH",
                   help="adapter on top of the model: a run folder, or a folder as peft writes it")
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
    p.add_argument("--keep", type=number(int, 0), nargs=2, default=None, metavar=("LOW", "HIGH"),
                   help="screen: keep the problems with LOW to HIGH of n samples right")
    p.add_argument("--pool-out", default=None, metavar="FILE", help="file for the problems that --keep keeps")
    p.add_argument("--labbook", default=None, help="file that gets a record of this evaluation")
    p.add_argument("--notes", default="", help="free text for the record")
    p.add_argument("--device", default="auto", help="cuda, mps, cpu, or auto: the first that is there")
    p.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"],
                   help="dtype of the products (auto: bf16 on cuda, fp32 elsewhere)")
    args = common.parse_args(p, argv)
    if args.k and max(args.k) > (1 if args.greedy else args.n):
        p.error(f"--k {max(args.k)} needs at least as many samples; --n is {1 if args.greedy else args.n}")
    if args.tasks and args.split:
        p.error("--tasks FILE takes the place of --split; give one of them")
    if bool(args.keep) != bool(args.pool_out):
        p.error("--keep LOW HIGH and --pool-out FILE belong together; give both")
    if args.keep and not args.keep[0] <= args.keep[1] <= args.n:
        p.error(f"--keep {args.keep[0]} {args.keep[1]}: LOW <= HIGH <= --n {args.n} is needed (1 {args.n - 1} keeps "
                f"the problems that are sometimes right)")
    for flag, given in [("--greedy", args.greedy), ("--out", args.out), ("--k", args.k)]:
        if args.keep and given:
            p.error(f"{flag} is not read by a screening (--keep)")
    for path in (args.pool_out, f"{args.pool_out}.meta.json") if args.pool_out else ():
        if Path(path).exists():
            p.error(f"--pool-out {args.pool_out}: {path} exists, and a pool is written once; take another name")
    for path in (args.out, f"{args.out}.samples.jsonl") if args.out else ():
        if Path(path).exists():
            p.error(f"--out {args.out}: {path} exists; take another name")
    return args


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    common.fail_in_one_line(args=args)   # now with the flags that an error's advice names
    start = time.monotonic()
    if args.labbook:
        common.check_writable(args.labbook)
    device = common.pick_device(args.device)
    folder = find_folder(args.model)
    task = get_task(args.task, args.tasks_dir)
    split = args.split or (task.train if args.keep else task.splits[0])
    path = Path(args.tasks) if args.tasks else task.path(split)
    rows = load_rows(path, task, args.limit)
    tokenizer = common.load_tokenizer(folder, args.template)
    model = load_model(folder, device=device, compute_dtype=common.pick_precision(args.precision, device))
    adapter = set_up_lora(model, folder, args)
    engine = Engine(model, tokenizer, slots=args.slots)
    named = args.model + (f" --adapter {args.adapter}" if args.adapter else "")   # as it is typed
    record_of_model = common.model_record(args, folder, adapter)
    for flag, file in [("--out", args.out), ("--pool-out", args.pool_out)]:
        if file:   # a place that cannot be written is said before the sampling, not after
            try:
                Path(file).parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise UserError(f"{flag} {file}: cannot be written ({e.strerror}: {Path(file).parent})") from e

    if args.keep:
        room = model.config.max_position_embeddings - args.max_new
        fits = [row for row in rows if len(common.encode_prompt(tokenizer, row["prompt"])) <= room]
        if len(fits) < len(rows):
            print(f"refused {len(rows) - len(fits)} of {len(rows)} candidates: with --max-new {args.max_new} their "
                  f"prompts do not fit the context of {model.config.max_position_embeddings} tokens")
        if not fits:
            raise UserError(f"{path}: with --max-new {args.max_new} no candidate fits the context")
        check_apart(fits, path, task)

        def sampled(rows, n, ks, step):
            return evaluate(engine, tokenizer, task, rows, n, args.max_new, ks, args.temperature, args.seed,
                            stop=args.stop, step=step)[0]
        head = sampled(fits[:HEADROOM["problems"]], HEADROOM["n"], [1, 8, 32], SCREENING + 1)
        check_headroom(head, f"{named} on {path}")
        kept, counts, tokens = screen(lambda rows: sampled(rows, args.n, [1], SCREENING), fits, args.keep)
        if not kept:
            raise UserError(f"--keep {args.keep[0]} {args.keep[1]}: none of {len(fits)} candidates has so many of "
                            f"{args.n} samples right; nothing is written")
        base = {"base_rate": np.mean([c for c in counts if args.keep[0] <= c <= args.keep[1]]) / args.n,
                "base_rate_candidates": np.mean(counts) / args.n}
        meta = write_pool(args.pool_out, kept, {
            "model": record_of_model, "task": task.name, "seed": args.seed, "n": args.n,
            "keep": args.keep, "candidates": len(fits), "kept": len(kept), **base,
            "counts": [counts.count(c) for c in range(args.n + 1)], "headroom": {
                k: head[k] for k in ("pass_at", "groups", "limit", "n")},
            "max_new": args.max_new, "temperature": args.temperature, "stop": args.stop,
            "source": {"path": common.short_path(path), "sha256": common.sha256_file(path)},
            "template_sha256": head["template_sha256"], "extractor": task.extractor, "git": common.git_state(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        print(f"{args.pool_out}: {len(kept)} of {len(fits)} problems with {args.keep[0]} to {args.keep[1]} of {args.n} "
              f"right; base rate {base['base_rate']:.3f} of the kept, {base['base_rate_candidates']:.3f} of all; "
              f"sha256 {meta['sha256'][:12]}\nthe choice flatters the base rate of the kept; with fresh samples:\n"
              f"    {again(args, len(kept))}")
        result = {"split": Path(args.pool_out).stem, "tokens": tokens + head["tokens"], **meta}
        path, rows, rollouts = args.pool_out, kept, len(fits) * args.n + head["limit"] * head["n"]
        said = f"pool {args.pool_out}: {len(kept)} of {len(fits)} problems, base rate {base['base_rate']:.3f}"
    else:
        result, samples = evaluate(engine, tokenizer, task, rows, args.n, args.max_new, args.k, args.temperature,
                                   args.seed, args.greedy, args.stop)
        result = {"model": args.model, "adapter": args.adapter, "model_sha256": record_of_model["sha256"],
                  "split": Path(path).stem, "label": args.label, **result}
        print(table(result))
        rollouts = len(samples)
        said = (f"eval {args.label or named} {task.name} {result['split']}: "
                f"pass@1 {result['pass_at'].get('1', float('nan')):.3f}")
    if args.out:
        common.append_jsonl(Path(args.out + ".samples.jsonl"), samples)
        common.write_text(args.out, json.dumps(common.finite(result)) + "\n")
        print(f"written to {args.out} and {args.out}.samples.jsonl")
    if args.labbook:
        scores = {k: v for k, v in result.items() if k != "problems"}
        kind = "data" if args.keep else "eval"
        record = {"kind": kind, "run_id": f"{kind}-{time.strftime('%y%m%d-%H%M%S')}",
                  "parent": common.parent_run(folder, adapter),
                  "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "script": "eval_passk", "arm": None,
                  "task": task.name, "model": record_of_model,
                  "data": [{"path": common.short_path(path), "sha256": common.sha256_file(path), "rows": len(rows)}],
                  "seed": args.seed, "config": common.recorded_flags(args),
                  "budget": {"prompts": len(rows), "rollouts": rollouts, "tokens_sampled": result["tokens"],
                             "tokens_trained": 0, "wall_s": round(time.monotonic() - start, 1),
                             "peak_mem_gib": common.peak_mem_gib(device), "cost": None},
                  "losses": {}, "scores": common.finite(scores), "status": "ok", "git": common.git_state(),
                  "versions": common.versions(), "device": common.device_name(device), "notes": args.notes}
        common.append_record(args.labbook, record, f"- {time.strftime('%Y-%m-%d %H:%M')} {said}")
