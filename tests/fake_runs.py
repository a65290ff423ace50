"""
Run folders as the training scripts leave them, with scores that a test chooses. No model is run.
"""
import json
import time
from pathlib import Path

import numpy as np
from helpers import tiny_tokenizer

import common

VERSIONS = {"python": "3.12", "torch": "2.x"}


def evaluation(p, n=32, seed=0, split="heldout-same", lenient=None, greedy=None, length=40.0, drift=1.0, max_new=64,
               entropy=0.5, exact=False):
    """One row of eval.jsonl. p (P,): chance of each problem; exact: round(p n) right answers and no draw."""
    rng = np.random.default_rng(seed)
    p = np.asarray(p, float)
    c = np.round(p * n).astype(int) if exact else rng.binomial(n, p)
    lc = np.maximum(c, c if lenient is None else np.round(np.asarray(lenient) * n).astype(int))
    problems = []
    for i, right in enumerate(c):
        correct = [bool(j < right) for j in range(n)]
        lengths = [int(max(3, rng.normal(length * (1 if ok else drift), 4))) for ok in correct]
        answers = ["7" if ok else str(rng.integers(10)) for ok in correct]
        problems.append({"id": f"{split}-{i}", "c": int(right), "n": n, "lenient_c": int(lc[i]), "lengths": lengths,
                         "correct": correct, "answers": answers})
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k <= n]
    pass_at = {k: [common.pass_at_k(n, int(x), k) for x in c] for k in ks}
    lengths = np.array([x["lengths"] for x in problems])
    right = np.array([x["correct"] for x in problems])
    greedy = (p > 0.5).astype(int).tolist() if greedy is None else greedy
    return {"split": split, "task": "arithmetic", "n": n, "limit": len(p), "temperature": 1.0, "greedy": False,
            "max_new": max_new, "seed": 0, "template_sha256": "t" * 64, "extractor": "number-1",
            "pass_at": {str(k): float(np.mean(v)) for k, v in pass_at.items()},
            "lenient_pass_at": {str(k): float(np.mean([common.pass_at_k(n, int(x), k) for x in lc])) for k in ks},
            "se": {str(k): common.mean_and_se(v)[1] for k, v in pass_at.items()},
            "ci95": {str(k): common.interval(v)[:2] for k, v in pass_at.items()},
            "mean_length": float(lengths.mean()),
            "mean_length_right": float(lengths[right].mean()) if right.any() else None,
            "mean_length_wrong": float(lengths[~right].mean()) if (~right).any() else None,
            "median_length_right": float(np.median(lengths[right])) if right.any() else None, "length_gap": -1.0,
            "truncated": 0.01, "entropy": entropy, "mean_logp": -entropy,
            "tokens_per_solved": float(lengths.sum() / max(1, right.sum())),
            "distinct_answers": float(np.mean([len(set(x["answers"])) for x in problems])),
            "tokens": int(lengths.sum()),
            "greedy_pass": float(np.mean(greedy)), "lenient_greedy_pass": float(np.mean(greedy)),
            "greedy_correct": greedy, "problems": problems}


def fake_run(folder, evals, arm="grpo", seed=0, script="train_grpo", status="ok", labbook=None, steps=20, metrics=None,
             samples=(), data="d" * 64, **flags):
    """evals: [(step, row)]. Writes a run folder, and with a labbook its start and run records -> the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    args = {"arm": arm, "seed": seed, "task": "arithmetic", "model": "data/tiny", "max_steps": steps, "lr": 3e-5,
            "num_generations": 8, "prompts_per_step": 8, "limit": 60, "eval_n": 32, "precision": "fp32", "lam": None,
            "output_dir": str(folder), **flags}
    base = {"model": {"name": "data/tiny", "sha256": "m" * 64},
            "data": [{"path": "data/arithmetic/train.jsonl", "sha256": data, "rows": 240}], "git": {"commit": "abc"},
            "versions": VERSIONS, "device": "cpu, test, 1 threads"}
    (folder / "config.json").write_text(json.dumps({"args": args, "arm": arm, "argv": [], **base}))
    (folder / f"{script}.py").write_text("# a copy\n")
    if metrics is None:
        rng = np.random.default_rng(seed)
        metrics = [{"step": i + 1, "reward": 0.6 + 0.05 * rng.normal(), "loss": float(np.exp(-i / 3)), "entropy": 0.5,
                    "no_spread": 0.2, "length": 40.0, "kl": 0.001 * i} for i in range(steps)]
    common.append_jsonl(folder / "metrics.jsonl", metrics)
    common.append_jsonl(folder / "eval.jsonl", [{"step": step, **row} for step, row in evals])
    common.append_jsonl(folder / "samples.jsonl", samples)
    scores = {}
    for step, row in evals:
        scores.setdefault(row["split"], {})["after" if step else "before"] = {
            **{f"pass@{k}": v for k, v in row["pass_at"].items()}, "se": row["se"], "greedy": row["greedy_pass"],
            "mean_length": row["mean_length"]}
    record = {"run_id": folder.name, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "script": script, "arm": arm,
              "task": "arithmetic", "seed": seed, "config": args, **base, "notes": ""}
    end = {**record, "kind": "run", "budget": {"prompts": 160, "rollouts": 1280, "tokens_sampled": 50000,
                                               "tokens_trained": 40000, "wall_s": 60.0 + seed, "peak_mem_gib": None,
                                               "peak_rss_gib": 1.2, "cost": None},
           "losses": {"last": 0.1}, "scores": scores, "status": status}
    if labbook:
        common.append_record(labbook, {**record, "kind": "start"}, "- start")
    if status != "no end":
        if labbook:
            common.append_record(labbook, end, "- end")
        (folder / "final.json").write_text(json.dumps(end))
    return folder


def rollouts(steps=(1, 10, 20), problems=2, samples=8, seed=0, injected=True):
    """Rows of samples.jsonl with real ids of the tiny tokenizer; every fourth answer holds an injected line."""
    tokenizer, rng, out = tiny_tokenizer(), np.random.default_rng(seed), []

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    for step in steps:
        for p in range(problems):
            prompt = ids(f"<|user|>What is {p} + {step}? </script><b>&</b><|end|><|assistant|>")
            for i in range(samples):
                right, cut = bool(rng.random() < 0.5), i % 5 == 4
                tool = ("[tool: 4]\n", 0) if injected and i % 4 == 1 else ("", 0)
                pieces = [("so it is ", 1), tool, (f"#### {p + step}", 1)]
                tokens, mask = list(prompt), [0] * len(prompt)
                for text, m in pieces:
                    tokens += ids(text)
                    mask += [m] * len(ids(text))
                out.append({"step": step, "id": f"p{p}", "sample": i, "ids": tokens, "prompt_length": len(prompt),
                            "mask": mask, "text": "so it is", "finish": "length" if cut else "eos",
                            "reward": float(right and not cut), "adv": 0.0 if p == 1 else 1.0,
                            "right": right and not cut, "lenient": right, "answer": None})
    return out
