"""
The lab book and the run folders as figures, tables, verdicts and one page. Reads, and never starts a run.

    python report.py                                          every run under runs/ -> runs/report/report.html
    python report.py --runs runs/grpo-s0 runs/grpo-s1 runs/grpo-s2 --output-dir runs/reality
    python report.py --check                                  the chain of the lab book, lost runs, predictions
    python report.py --register-margin "heldout-same: success if gain > max(spread, 2*se); useless otherwise"

Runs that differ in the seed alone are one condition. Its gain is the mean over seeds after minus before, the same
problems before and after. It counts when it exceeds the larger of

    spread = highest minus lowest of the seeds' scores          and          2 se,

se the standard error over problems of the paired difference, in the strict reading (the marked answer) and in the
lenient one (the last number). Strict alone is "format". A gain that a control shows too is labelled so. One seed is a
lead and two seeds are a range. Seeds from 100 on are for tuning, and confirm nothing. The split that a task lists first
is the family that was trained on ("inside"), the second the other family ("outside").

A margin is one rule a family, `SPLIT: LEVEL if TEST; ...; LEVEL otherwise`, the levels success, weak, useless from best
to worst, the tests on gain, spread and se (numbers, + - *, max, min, comparisons, and, or). `SPLIT: TEST` is short for
success if TEST, useless otherwise. A rule that leaves a gain without a level is refused, and so is one that is younger
than a run it would judge: it must stand in the lab book before that run's start.
"""
import ast
import base64
import json
import math
import re
import time
from collections import Counter, defaultdict, namedtuple
from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations
from pathlib import Path

import numpy as np

import common
from common import ROOT, UserError

# what tells two runs apart without being a setting of the experiment
BOOKKEEPING = {"seed", "output_dir", "labbook", "notes", "resume", "curves", "predict", "wandb", "price_per_hour",
               "keep", "save_every", "preset", "arm", "eval_every", "eval_kl", "any_pool", "device", "precision",
               "trained_parameters"}
CONDITIONS = ("task", "split", "template_sha256", "n", "temperature", "limit", "extractor", "max_new", "seed")
CONTROLS = ("random_reward", "permuted_reward", "format_only")
TUNING = 100   # seeds from here on chose settings
LEVERS = "more steps, more problems, a larger group, in that order, would narrow it"


def get_args(argv=None):
    p = common.Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--runs", nargs="+", default=None, metavar="FOLDER",
                   help="run folders, folders of run folders, or JSON files of eval_passk.py (default: runs/)")
    p.add_argument("--labbook", default="labbook.md", help="file of the records")
    p.add_argument("--output-dir", default="runs/report", help="folder for figures, tables and the page")
    p.add_argument("--check", action="store_true", help="only check the lab book: chain, lost runs, predictions")
    p.add_argument("--register-margin", default=None, metavar="RULE", help="append a margin to the lab book, no report")
    p.add_argument("--lesson", default=None, metavar="'RUN: TEXT'", help="append what a missed prediction taught")
    args = common.parse_args(p, argv)
    if sum(map(bool, (args.check, args.register_margin, args.lesson))) > 1:
        p.error("--check, --register-margin and --lesson are three jobs; give one of them")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Reading run folders. What cannot be used is said and left alone; the rest goes on without it.

@dataclass
class Run:
    name: str
    folder: Path
    args: dict                                   # every resolved flag
    arm: str
    script: str
    seed: int
    model: dict
    data: list
    device: str = ""                             # as it was found, whatever --device said
    record: dict = field(default_factory=dict)   # the `run` record; empty while there is none
    metrics: list = field(default_factory=list)
    evals: dict = field(default_factory=dict)    # split -> rows of eval.jsonl by step

    @property
    def status(self):
        return self.record.get("status", "no end")

    @property
    def products(self):
        """Their dtype: --precision auto is one on a GPU and another on a CPU, and then two settings."""
        asked = self.args.get("precision") or "auto"
        return asked if asked != "auto" else "fp32" if self.device.startswith(("cpu", "mps")) else "bf16"

    def base(self, split):
        rows = self.evals.get(split, [])
        return rows[0] if rows and rows[0]["step"] == 0 else None

    def final(self, split):
        rows = self.evals.get(split, [])
        return rows[-1] if rows and rows[-1]["step"] > 0 else None


def read_whole(path, keys, said):
    """Rows of a JSON-lines file that are objects with all of `keys`; the others are counted in `said`."""
    rows, bad = [], 0
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and all(k in row for k in keys):
                rows.append(row)
            else:
                bad += 1
    if bad:
        said.append(f"{path}: {bad} torn or foreign rows left out, {len(rows)} read")
    return rows


def moment(record):
    """A record's time in seconds, whatever the time zone it was written in; 0 without one."""
    try:
        return datetime.strptime(record["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0


def load_run(folder, said):
    """A run folder -> Run, or None with the reason in `said`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        args, arm = {**config["args"], **config.get("used", {})}, config["arm"]   # used: what a default came to
        run = Run(folder.name, folder, args, str(arm), "", int(args["seed"]), dict(config["model"] or {}),
                  list(config["data"]), str(config.get("device") or "cpu"))
    except FileNotFoundError:
        return said.append(f"{folder}: skipped, no config.json, so it is no run folder of these scripts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return said.append(f"{folder}: skipped, config.json cannot be used ({type(e).__name__}: {e})")
    copies = [p.stem for p in folder.glob("*.py")]
    run.script = copies[0] if copies else "unknown"
    if (folder / "final.json").exists():
        try:
            run.record = json.loads((folder / "final.json").read_text(encoding="utf-8"))
            run.script = run.record["script"]
            run.args["max_steps"] = run.record["config"]["max_steps"]   # a resume may have raised it
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            run.record = {}
            said.append(f"{folder}: final.json cannot be used ({type(e).__name__}: {e})")
    if not run.record:
        said.append(f"{folder}: half-written (no end: still running, or killed); it stays a row of the table of runs")
    run.metrics = read_whole(folder / "metrics.jsonl", ("step",), said)
    for row in read_whole(folder / "eval.jsonl", ("step", "split", "pass_at", "problems", *CONDITIONS[2:]), said):
        run.evals.setdefault(row["split"], []).append(row)
    for rows in run.evals.values():
        rows.sort(key=lambda r: r["step"])
    return run


def load_all(paths, said):
    """Folders and files -> (runs, results of eval_passk.py)."""
    runs, evals = [], []
    for path in map(Path, paths):
        if not path.exists():
            said.append(f"{path}: skipped, there is nothing by that name")
        elif path.is_file():
            rows = read_whole(path, ("pass_at", "problems", *CONDITIONS), said)
            evals += [{"step": 0, **row} for row in rows[:1]]
            if not rows:
                said.append(f"{path}: skipped, it is no result of eval_passk.py --out")
        else:
            below = sorted(p.parent for p in path.glob("*/config.json"))
            folders = [path] if (path / "config.json").exists() or not below else below
            if below and folders is below:
                strange = [p.name for p in path.iterdir() if p.is_dir() and p not in below and p.name not in
                           ("report", "results") and not (p / "report.html").exists()]
                said.extend(f"{path / name}: skipped, no config.json, so it is no run folder" for name in strange)
            runs += [r for r in (load_run(f, said) for f in folders) if r]
    seen = Counter(r.folder.resolve() for r in runs)
    runs = [r for i, r in enumerate(runs) if r.folder.resolve() not in {x.folder.resolve() for x in runs[:i]}]
    said.extend(f"{p}: named {n} times, read once" for p, n in seen.items() if n > 1)
    return runs, evals


# ----------------------------------------------------------------------------------------------------------------------
# Conditions (runs that differ in the seed alone) and studies (conditions with one task and one start)

@dataclass
class Condition:
    label: str
    arm: str
    runs: list
    look: tuple = ("#000000", "-", "o")

    @property
    def control(self):
        return self.arm in CONTROLS or self.runs[0].args.get("lr") == 0

    @property
    def seeds(self):
        return [r.seed for r in self.runs]

    def rows(self, split, base):
        """-> (before, after): one evaluation a seed; before is the run's own step 0, or the shared one."""
        pairs = [(r.base(split) or base, r.final(split)) for r in self.runs]
        pairs = [(b, a) for b, a in pairs if b and a]
        return [b for b, _ in pairs], [a for _, a in pairs]


@dataclass
class Study:
    task: str
    model: dict
    conditions: list
    inside: str
    outside: str | None
    splits: list
    base: dict                       # split -> the evaluation of the untrained model
    lost: list = field(default_factory=list)    # failed, unfinished and tuning runs
    noise: list = field(default_factory=list)   # further evaluations of the untrained model, with other seeds
    name: str = ""

    def find(self, name):
        """'grpo', or 'grpo_length_penalty:0.5' with a lam -> such a condition, the one of most seeds, or None."""
        arm, _, lam = name.partition(":")
        found = [c for c in self.conditions if c.arm == arm and c.runs[0].args.get("lr") != 0
                 and (not lam or float(c.runs[0].args.get("lam") or 0) == float(lam))]
        return max(found, key=lambda c: len(c.runs), default=None)


def settings(run):
    """Every setting by name that may tell two runs apart, the seed and bookkeeping aside."""
    own = {k: v for k, v in run.args.items() if k not in BOOKKEEPING and v is not None}   # None: as if not there
    return {"script": run.script, "arm": run.arm, **own, "precision": run.products,
            "data": [d.get("sha256") for d in run.data]}


def differing(a, b):
    """-> names of the settings in which two runs differ."""
    x, y = settings(a), settings(b)
    keys = [k for k in {**x, **y} if x.get(k) != y.get(k)]
    # an adapter against all weights is one difference: where there is no rank there is nothing to scale or to place
    adapter = ("lora_alpha", "lora_targets") if not (x.get("lora_rank") and y.get("lora_rank")) else ()
    return [k for k in keys if k not in adapter]


def in_label(key, value):
    """A setting that tells a condition from others of its arm, as its label has it."""
    if key == "lora_rank":
        return f"LoRA {value}" if value else "all weights"
    return f"{key} {str('default' if value is None else value)[:24]}"


#        arm                    colour     line   marker     (Okabe-Ito; lines and markers carry it in grey)
LOOKS = {"untrained":           ("#000000", ":", "X"),
         "rft_shortest":        ("#E69F00", "-", "o"),
         "rft_shortest_braked": ("#D55E00", "--", "s"),
         "rft_random":          ("#8C6D00", "-.", "^"),
         "grpo":                ("#0072B2", "-", "D"),
         "grpo_length_penalty": ("#56B4E9", "--", "v"),
         "dr_grpo":             ("#004C6D", "-.", "P"),
         "opd":                 ("#CC79A7", "-", "*"),
         "sft":                 ("#009E73", "--", "h"),
         "random_reward":       ("#777777", ":", "<"),
         "permuted_reward":     ("#999999", "-.", ">"),
         "format_only":         ("#BBBBBB", "--", "d")}
OTHERS = ["#5E3C99", "#A6761D", "#1B7837", "#B2182B", "#35978F", "#6A51A3"]
VARIANTS = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "v"), ((0, (5, 1, 1, 1, 1, 1)), "P"), ((0, (1, 1)), "<")]


def look_of(arm, variant):
    """An arm's colour is the same in every figure of every report; variants of an arm differ in line and marker."""
    colour, line, marker = LOOKS.get(arm) or (OTHERS[sum(map(ord, arm)) % len(OTHERS)], "-", "o")
    others = [v for v in VARIANTS if v[0] != line and v[1] != marker]
    return (colour, line, marker) if variant == 0 else (colour, *others[(variant - 1) % len(others)])


def make_conditions(runs, said):
    """Groups runs by settings and names each group by what tells it from others of its arm."""
    groups = defaultdict(list)
    for run in runs:
        groups[json.dumps(settings(run), sort_keys=True)].append(run)
    by_arm = defaultdict(list)
    for group in groups.values():
        by_arm[group[0].arm].append(group)
    out = []
    for arm in sorted(by_arm, key=lambda a: (list(LOOKS).index(a) if a in LOOKS else 99, a)):
        several = sorted(by_arm[arm], key=lambda g: (g[0].args.get("lr") == 0,    # the arm itself before its control
                                                     json.dumps(settings(g[0]), sort_keys=True)))
        told = sorted({k for a, b in combinations(several, 2) for k in differing(a[0], b[0])} - {"lam"})
        for i, group in enumerate(several):
            values, words = settings(group[0]), [arm]
            words += [f"lam {values['lam']:g}"] if values.get("lam") is not None else []
            words += [in_label(k, values.get(k)) for k in told[:3] if k != "data"]
            words += [f"({i + 1})"] if " ".join(words) in {c.label for c in out} else []
            out.append(Condition(" ".join(words), arm, one_a_seed(group, " ".join(words), said), look_of(arm, i)))
    return out


def one_a_seed(group, label, said):
    """The runs of a condition by seed. Two with one seed are one measurement: the later is kept, and it is said."""
    kept = {}
    for run in sorted(group, key=lambda r: moment(r.record)):
        if run.seed in kept:
            said.append(f"{label}: seed {run.seed} ran twice; {run.name} counts, {kept[run.seed].name} does not")
        kept[run.seed] = run
    runs = [kept[s] for s in sorted(kept)]
    print_of = [json.dumps([[p["answers"], p["lengths"]] for s in r.evals for p in (r.final(s) or {"problems": []})
                            ["problems"]]) for r in runs]
    for a, b in combinations(range(len(runs)), 2):
        if len(print_of[a]) > 4 and print_of[a] == print_of[b] and runs[a].args.get("lr") != 0:   # lr 0: by design
            said.append(f"{label}: seeds {runs[a].seed} and {runs[b].seed} give the same answers and lengths: one "
                        f"model evaluated twice, or a seed that moves nothing")
    for what in ("git", "versions", "device"):
        if len({json.dumps(r.record.get(what), sort_keys=True) for r in runs}) > 1:
            said.append(f"{label}: {what} differs between its seeds")
    return runs


def make_studies(runs, evals, said):
    """-> studies, the largest first. Failed and unfinished runs and tuning seeds are kept aside in `lost`."""
    def key(run):
        return str(run.args.get("task")), str(run.model.get("sha256"))
    groups, studies = defaultdict(list), []
    for run in runs:
        if key(run) in {key(r) for r in runs if r.evals}:
            groups[key(run)].append(run)
    for (task, sha), group in sorted(groups.items(), key=lambda g: -len(g[1])):
        used = [r for r in group if r.status == "ok" and r.seed < TUNING and any(r.final(s) for s in r.evals)]
        if tuned := [r.name for r in group if r.seed >= TUNING]:
            said.append(f"tuning runs (seed {TUNING} and up) confirm nothing and are left out: {', '.join(tuned)}")
        splits = list(dict.fromkeys(s for r in group for s in r.evals))
        families = [s for s in splits if "wording" not in s]   # another wording is no other family
        base, again = {}, [e for e in evals if e.get("model_sha256") == sha]
        for row in [r.base(s) for r in used for s in splits] + again:
            if row and row["split"] in splits:
                base.setdefault(row["split"], row)
        for x, row in base.items():
            own = [b for r in used if (b := r.base(x)) and not differing_rows(b, row)]
            if any(b["pass_at"] != row["pass_at"] for b in own):
                said.append(f"{task} {x}: step 0 is not the same in all runs, though its conditions are (another "
                            f"device, precision or version); each run is read against its own")
        noise = [e for e in again if e["split"] in base and e["seed"] != base[e["split"]]["seed"]
                 and not differing_rows(e, base[e["split"]], ("seed",))]
        studies.append(Study(task, group[0].model, make_conditions(used, said), families[0] if families else splits[0],
                             families[1] if len(families) > 1 else None, splits, base,
                             [r for r in group if r not in used], noise))
    for s in studies:
        s.name = "" if len(studies) == 1 else f"{s.task}-{str(s.model.get('sha256'))[:6]}"
    return studies


# ----------------------------------------------------------------------------------------------------------------------
# Numbers of an evaluation

def differing_rows(a, b, but=()):
    """Why two evaluations may not be compared: 'n 8 against 32', ...; empty when they may."""
    out = [f"{k} {str(a.get(k))[:12]} against {str(b.get(k))[:12]}" for k in CONDITIONS if k not in but
           and a.get(k) != b.get(k)]
    if not out and [p["id"] for p in a["problems"]] != [p["id"] for p in b["problems"]]:
        out.append("the problems")
    return out


def top_k(row):
    return max(map(int, row["pass_at"]))


def scalar(row, key):
    """One number of an evaluation by name, or None where it was not recorded."""
    if key.startswith("lenient@"):
        return row.get("lenient_pass_at", {}).get(key[8:])
    if key.startswith("pass@"):
        return row["pass_at"].get(key[5:])
    if key == "top":
        return row["pass_at"][str(top_k(row))]
    if key == "gap":
        return row["pass_at"][str(top_k(row))] - row["pass_at"]["1"]
    if key == "greedy_lead":
        return None if row.get("greedy_pass") is None else row["greedy_pass"] - row["pass_at"]["1"]
    if key == "wrong_minus_right":
        right, wrong = row.get("mean_length_right"), row.get("mean_length_wrong")
        return None if right is None or wrong is None else wrong - right
    return row.get({"greedy": "greedy_pass"}.get(key, key))


def vector(row, key):
    """The same number for each problem (P,), where it is a mean over problems; else None."""
    P = row["problems"]
    if key.startswith("pass@"):
        return np.array([common.pass_at_k(p["n"], p["c"], int(key[5:])) for p in P])
    if key.startswith("lenient@"):
        return np.array([common.pass_at_k(p["n"], p["lenient_c"], int(key[8:])) for p in P])
    if key in ("top", "gap"):
        top = np.array([common.pass_at_k(p["n"], p["c"], top_k(row)) for p in P])
        return top - np.array([p["c"] / p["n"] for p in P]) * (key == "gap")
    if key == "mean_length":
        return np.array([np.mean(p["lengths"]) for p in P])
    if key == "distinct_answers":
        return np.array([len(set(p["answers"]) - {None}) for p in P], float)
    if key == "greedy" and row.get("greedy_correct"):
        return np.array(row["greedy_correct"], float)
    if key == "greedy_lead" and row.get("greedy_correct"):
        return np.array(row["greedy_correct"], float) - np.array([p["c"] / p["n"] for p in P])


def length_gaps(row):
    """Mean length of right minus wrong answers, for each problem that has both."""
    out = []
    for p in row["problems"]:
        right = [n for n, ok in zip(p["lengths"], p["correct"]) if ok]
        wrong = [n for n, ok in zip(p["lengths"], p["correct"]) if not ok]
        if right and wrong:
            out.append(float(np.mean(right) - np.mean(wrong)))
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Verdicts: pure functions of scores

def spread_of(values):
    """Highest minus lowest over seeds; None for one seed."""
    return float(max(values) - min(values)) if len(values) > 1 else None


def judge(before, after, lenient_before, lenient_after):
    """
    before, after (S, P): the score of each of P problems in the runs of S seeds, strict; the same in the lenient
    reading. -> dict with `code`: uninformative, effect, worse, format, lenient, spread, error.
    """
    def side(x, y):
        diff, means = (y - x).mean(0), y.mean(1)
        se = common.mean_and_se(diff)[1] or 0.0
        spread = spread_of(means)
        return {"before": float(x.mean()), "after": float(y.mean()), "gain": float(diff.mean()), "spread": spread,
                "se": se, "floor": max(spread or 0.0, 2 * se), "means": [float(m) for m in means]}
    s, l = side(before, after), side(lenient_before, lenient_after)
    wide = math.hypot(common.mean_and_se(before.mean(0))[1] or 0, common.mean_and_se(after.mean(0))[1] or 0)
    ends = [s["before"], *s["means"]]
    if max(ends) <= 0.005 or min(ends) >= 0.995:   # nothing could have gone up, or nothing was ever right
        code = "uninformative"
    elif abs(s["gain"]) > s["floor"]:
        same = abs(l["gain"]) > l["floor"] and l["gain"] * s["gain"] > 0
        code = ("effect" if same else "format") if s["gain"] > 0 else "worse" if same else "format lost"
    elif l["gain"] > l["floor"]:
        code = "lenient"
    else:
        code = "spread" if (s["spread"] or 0) > 2 * s["se"] else "error"
    return {**s, "lenient": l, "seeds": len(after), "problems": after.shape[1], "code": code, "unpaired_se": wide,
            "needs_pairing": 2 * s["se"] < abs(s["gain"]) <= 2 * wide, "ci95": paired_bootstrap(before, after)}


def paired_bootstrap(before, after, repeats=2000, seed=0):
    """95% interval of the mean paired difference; resamples problems, both sides together. (S, P) each."""
    diff = (after - before).mean(0)
    picks = np.random.default_rng(seed).integers(0, len(diff), (repeats, len(diff)))
    return tuple(float(x) for x in np.quantile(diff[picks].mean(1), [0.025, 0.975]))


def mcnemar(before, after):
    """Right or wrong greedy answers to the same problems -> repairs, breakages, z, exact two-sided p."""
    up = sum(1 for b, a in zip(before, after) if a and not b)
    down = sum(1 for b, a in zip(before, after) if b and not a)
    n = up + down
    tail = sum(math.comb(n, i) for i in range(min(up, down) + 1)) / 2 ** n
    return {"repairs": up, "breakages": down, "wrong": sum(1 for b in before if not b),
            "right": sum(1 for b in before if b), "z": (up - down) / math.sqrt(n) if n else 0.0,
            "p": min(1.0, 2 * tail)}


def seeds_in_words(n):
    return "one run, a lead" if n == 1 else "two seeds, a range" if n == 2 else f"{n} seeds"


def in_words(v, split):
    """One clause of a verdict."""
    text = f"pass@1 on {split} goes {v['before']:.3f} to {v['after']:.3f} ({v['gain']:+.3f}"
    text += {1: "; one run, a lead)", 2: "; two seeds, a range)"}.get(v["seeds"], ")")
    error = f"two paired standard errors ({2 * v['se']:.3f})"
    name = "range" if v["seeds"] == 2 else "spread"
    spread = "" if v["spread"] is None else f"the {name} over seeds ({v['spread']:.3f})"
    noise = f"{spread} and {error}" if spread else error
    lenient = f"lenient {v['lenient']['gain']:+.3f} against {v['lenient']['floor']:.3f}"
    text += {"uninformative": ": uninformative, the family is at 0 or 1 before and after",
             "effect": f": more than {noise}, and the lenient reading agrees ({lenient})",
             "worse": f": a loss, larger than {noise}; {lenient}",
             "format": f": more than {noise} in the strict reading alone ({lenient}): format",
             "format lost": f": a loss beyond {noise} in the strict reading alone ({lenient}): format",
             "lenient": f": no more than {noise}, though the lenient reading rises ({lenient})",
             "spread": f": {spread} exceeds the gain, and that is the finding; {LEVERS}",
             "error": f": no more than {error}, so it cannot be told from none"}[v["code"]]
    if v["needs_pairing"] and v["code"] in ("effect", "worse", "format"):
        text += f"; only pairing shows it: unpaired, two standard errors are {2 * v['unpaired_se']:.3f}"
    return text


def judge_condition(study, c, split):
    """-> verdict of a condition on a split, or None where it was not evaluated before and after."""
    before, after = c.rows(split, study.base.get(split))
    if not after:
        return None
    why = sorted({w for b, a in zip(before, after) for w in differing_rows(b, a)} |
                 {w for a in after[1:] for w in differing_rows(after[0], a)})
    if why:
        return {"code": "refused", "why": why, "seeds": len(after)}
    m = [[np.stack([vector(r, k) for r in rows]) for rows in (before, after)] for k in ("pass@1", "lenient@1")]
    v = judge(*m[0], *m[1])
    v["flips"] = [{"seed": r.seed, **mcnemar(b["greedy_correct"], a["greedy_correct"])} for r, b, a in
                  zip([r for r in c.runs if r.final(split)], before, after)
                  if b.get("greedy_correct") and a.get("greedy_correct")]
    return v


def compare(study, a, b, split):
    """Condition a against b on the same problems -> dict with gain (a - b), floor, code, and what differs."""
    (_, x), (_, y) = a.rows(split, study.base.get(split)), b.rows(split, study.base.get(split))
    if not x or not y:
        return None
    keys = differing(a.runs[0], b.runs[0])
    out = {"a": a.label, "b": b.label, "split": split, "keys": keys, "seeds": min(len(x), len(y)),
           "explains": "describes, does not explain" if len(keys) > 1 else "one setting differs"}
    if why := differing_rows(x[0], y[0]):
        return {**out, "code": "refused", "why": why}
    strict, lenient = [difference([vector(r, k) for r in x], [vector(r, k) for r in y])
                       for k in ("pass@1", "lenient@1")]
    scores = [np.mean([vector(r, "pass@1") for r in rows], 0)[None] for rows in (y, x)]
    code = "not told apart"
    if abs(strict.mean) > strict.floor:
        both = abs(lenient.mean) > lenient.floor and lenient.mean * strict.mean > 0
        code = ("above" if strict.mean > 0 else "below") + ("" if both else " in format alone")
    return {**out, "gain": strict.mean, "floor": strict.floor, "lenient": lenient.mean, "code": code,
            "ci95": paired_bootstrap(*scores)}


def control_note(study, c, v, verdicts):
    """What the controls say about a gain; empty when none of them gained."""
    notes = []
    for other in study.conditions:
        w = verdicts.get((other.label, v["split"]))
        if other.control and other is not c and w and w["code"] in ("effect", "format"):
            pair = compare(study, c, other, v["split"])
            beyond = pair["code"] if pair else "not compared"
            notes.append(f"a control gains too ({other.label} {w['gain']:+.3f}), so the reward need not be the cause; "
                         f"against it this arm is {beyond}")
    return "; ".join(notes)


# ----------------------------------------------------------------------------------------------------------------------
# Effects: any number of an evaluation, with its noise

class Effect(namedtuple("Effect", "mean spread se seeds")):
    """mean; spread: highest - lowest over seeds (None: one seed); se over problems (None: unknown)."""
    @property
    def floor(self):
        return max(self.spread or 0.0, 2 * (self.se or 0.0))


def difference(x, y):
    """Two lists of per-problem vectors, one a seed (the seeds need not match) -> Effect of mean x - mean y."""
    diff = np.stack(x).mean(0) - np.stack(y).mean(0)
    spreads = [spread_of([v.mean() for v in side]) for side in (x, y)]
    known = [s for s in spreads if s is not None]
    return Effect(float(diff.mean()), max(known) if known else None, common.mean_and_se(diff)[1], min(len(x), len(y)))


def change(study, c, split, key, start=True):
    """Effect of training on a number of the evaluation: last minus step 0 (start=False: the last itself)."""
    before, after = c.rows(split, study.base.get(split))
    if any(differing_rows(b, a) for b, a in zip(before, after)):
        return None
    pairs = [(scalar(b, key), scalar(a, key)) for b, a in zip(before, after)]
    values = [a - b * start for b, a in pairs if a is not None and b is not None]
    if not values:
        return None
    vectors = [(vector(b, key), vector(a, key)) for b, a in zip(before, after)]
    se = None
    if all(b is not None and a is not None and len(a) == len(b) for b, a in vectors):
        se = common.mean_and_se(np.mean([a - b * start for b, a in vectors], 0))[1]
    return Effect(float(np.mean(values)), spread_of(values), se, len(values))


def against(study, a, b, split, key):
    """Effect of a minus b in a number of the last evaluation."""
    (_, x), (_, y) = a.rows(split, study.base.get(split)), b.rows(split, study.base.get(split))
    if not x or not y or differing_rows(x[0], y[0]):
        return None
    xs, ys = [[v for v in (scalar(r, key) for r in rows) if v is not None] for rows in (x, y)]
    if not xs or not ys:
        return None
    vectors = [[vector(r, key) for r in rows] for rows in (x, y)]
    if all(v is not None for side in vectors for v in side):
        return difference(*vectors)
    known = [s for s in (spread_of(xs), spread_of(ys)) if s is not None]
    return Effect(float(np.mean(xs) - np.mean(ys)), max(known) if known else None, None, min(len(xs), len(ys)))


def slope(points):
    """[(step, value)] -> least-squares slope per 100 steps and its standard error; None under 3 points."""
    points = [(s, v) for s, v in points if v is not None]
    if len(points) < 3:
        return None
    x, y = np.array(points, float).T
    x = (x - x.mean()) / 100
    if not x.any():
        return None
    b = float(x @ y / (x @ x))
    return b, float(np.sqrt(((y - y.mean() - b * x) ** 2).sum() / (len(x) - 2) / (x @ x)))


# ----------------------------------------------------------------------------------------------------------------------
# Margins

LEVELS = ("success", "weak", "useless")
ALLOWED = (ast.Expression, ast.Compare, ast.BoolOp, ast.And, ast.Or, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.UnaryOp,
           ast.USub, ast.Call, ast.Name, ast.Load, ast.Constant, ast.Gt, ast.GtE, ast.Lt, ast.LtE)


def compile_test(text, rule):
    """One TEST -> (code object, its numbers). Only what the grammar of the docstring has is let through."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as e:
        raise UserError(f"--register-margin {rule!r}: {text.strip()!r} is no test; write, for example, "
                        f"gain > max(spread, 2*se)") from e
    for node in ast.walk(tree):
        good = isinstance(node, ALLOWED)
        if isinstance(node, ast.Name):
            good = node.id in ("gain", "spread", "se", "max", "min")
        if isinstance(node, ast.Constant):
            good = type(node.value) in (int, float)
        if isinstance(node, ast.Call):
            good = isinstance(node.func, ast.Name) and node.func.id in ("max", "min") and len(node.args) > 1 \
                and not node.keywords
        if not good:
            raise UserError(f"--register-margin {rule!r}: {text.strip()!r} holds {type(node).__name__} "
                            f"{ast.unparse(node)}, which is not allowed (gain, spread, se, numbers, + - *, max, min, "
                            f"comparisons, and, or)")
    if not isinstance(tree.body, (ast.Compare, ast.BoolOp)) or "gain" not in {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}:
        raise UserError(f"--register-margin {rule!r}: {text.strip()!r} does not compare the gain with anything")
    return compile(tree, "margin", "eval"), [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]


def parse_margin(rule):
    """A rule -> {"text", "split", "levels": [(level, code or None for otherwise)]}; UserError when it cannot judge."""
    split, colon, body = rule.partition(":")
    split = split.strip()
    if not colon or not re.fullmatch(r"[\w-]+", split):
        raise UserError(f"--register-margin {rule!r}: expected SPLIT: RULE, for example "
                        f"'heldout-same: gain > max(spread, 2*se)'")
    clauses = [c.strip() for c in body.split(";") if c.strip()]
    if len(clauses) == 1 and not re.match(r"(success|weak|useless)\b", clauses[0]):
        clauses = [f"success if {clauses[0]}", "useless otherwise"]
    levels, numbers = [], [0.0]
    for i, clause in enumerate(clauses):
        m = re.fullmatch(r"(success|weak|useless)\s+(?:if\s+(.+)|otherwise)", clause)
        if not m or (m[2] is None and i < len(clauses) - 1):
            raise UserError(f"--register-margin {rule!r}: {clause!r} is no clause; write LEVEL if TEST, or, last, "
                            f"LEVEL otherwise (levels: {', '.join(LEVELS)})")
        code, found = compile_test(m[2], rule) if m[2] else (None, [])
        levels.append((m[1], code))
        numbers += found
    names = [n for n, _ in levels]
    if names != [n for n in LEVELS if n in names] or len(names) < 2 or "success" not in names:
        raise UserError(f"--register-margin {rule!r}: the levels must go from best to worst, each once, success among "
                        f"them: {', '.join(LEVELS)}; got {', '.join(names) or 'none'}")
    margin = {"text": rule.strip(), "split": split, "levels": levels}
    check_margin(margin, numbers)
    return margin


def check_margin(margin, numbers):
    """Walks gains from -1 to 1 over small and large noise: each gain has a level, a higher one never a worse level."""
    reached = set()
    edges = sorted({i / 200 for i in range(-200, 201)} | {s * x for x in numbers for s in (1, -1)})
    for spread in (0.0, 0.01, 0.05, 0.2):
        for se in (0.0, 0.005, 0.03, 0.1):
            around = {n * x for n in numbers for x in (spread, se)} | {spread, se, 2 * se}
            last = None
            for gain in sorted({g + d for g in {*edges, *around} for d in (-1e-9, 0, 1e-9)}):
                level = apply_margin(margin, gain, spread, se)
                said = f"--register-margin {margin['text']!r}: a gain of {gain:.4g} (spread {spread:g}, se {se:g})"
                if level is None:
                    raise UserError(f"{said} has no level; end with `useless otherwise`")
                rank = LEVELS.index(level)
                if last is not None and rank > last:
                    raise UserError(f"{said} is {level}, though a smaller one is {LEVELS[last]}")
                reached.add(level)
                last = rank
    if missing := [n for n, _ in margin["levels"] if n not in reached]:
        raise UserError(f"--register-margin {margin['text']!r}: no gain between -1 and 1 is ever {missing[0]}")


def apply_margin(margin, gain, spread, se):
    """-> level, or None when no clause holds. The first clause that holds decides."""
    names = {"gain": gain, "spread": spread, "se": se, "max": max, "min": min, "__builtins__": {}}
    for level, code in margin["levels"]:
        if code is None or eval(code, names):   # compiled from the tree that compile_test let through
            return level


def register_margin(labbook, rule):
    margin = parse_margin(rule)
    common.check_writable(labbook)
    known = common.read_labbook(labbook)[0] if Path(labbook).exists() else []
    have = [r["run_id"] for r in known if r.get("kind") in ("start", "run") and margin["split"] in json.dumps(
        [r.get("scores"), r.get("data")])]
    common.append_record(labbook, {"kind": "margin", "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                                   "split": margin["split"], "text": margin["text"]},
                         f"- {time.strftime('%Y-%m-%d %H:%M')} margin {margin['text']}")
    print(f"registered in {labbook}: {margin['text']}")
    if have:
        print(f"it judges none of the {len(set(have))} runs on {margin['split']} that the lab book holds already")


def margin_for(records, split, runs):
    """
    The newest margin of a family that stands before the start of every run it judges -> (margin or None, a sentence).
    The order is that of the lab book, whose chain shows an edit.
    """
    margins = [(i, r) for i, r in enumerate(records) if r.get("kind") == "margin" and r.get("split") == split]
    if not margins:
        return None, f"no margin was registered for {split}"
    starts = {}
    for i, r in enumerate(records):
        if r.get("kind") in ("start", "run"):   # by folder too: two studies may both have a seed 0 of one name
            for key in (r.get("run_id"), (r.get("run_id"), (r.get("config") or {}).get("output_dir"))):
                starts.setdefault(key, i)
    for r in runs:
        name = r.record.get("run_id", r.name)
        if (name, r.args.get("output_dir")) in starts:
            starts[name] = starts[name, r.args.get("output_dir")]
    names = [r.record.get("run_id", r.name) for r in runs]
    if absent := [x for x in names if x not in starts]:
        return None, f"refused: the lab book holds no start of {absent[0]}, so which came first cannot be told"
    first = min(names, key=starts.get)
    older = [m for m in margins if m[0] < starts[first]]
    if not older:
        return None, (f"refused: the margin of {margins[0][1]['time']} is younger than the run {first}, which it would "
                      f"judge")
    late = f"; {len(margins) - len(older)} later one(s) do not count" if len(margins) > len(older) else ""
    return parse_margin(older[-1][1]["text"]), f"margin of {older[-1][1]['time']}: {older[-1][1]['text']}{late}"


def margin_level(margin, v):
    """-> the level of a verdict under a margin, in words."""
    if v["code"] in ("refused", "uninformative"):
        return v["code"]
    if v["spread"] is None and re.search(r"\bspread\b", margin["text"]):
        return "cannot be judged: one seed has no spread"
    level = apply_margin(margin, v["gain"], v["spread"] or 0.0, v["se"])
    return level + (" (in the strict reading alone: format)" if v["code"] == "format" and level != "useless" else "")


# ----------------------------------------------------------------------------------------------------------------------
# Predictions, and the lab book

def predicted_value(key, record):
    """The number that a prediction is about -> (value or None, noise, what the noise is)."""
    split, _, name = key.rpartition(".")
    if split == "losses":
        return record.get("losses", {}).get(name), 0.0, "none recorded"
    if not split:
        value = record.get("budget", {}).get(key)
        return value, 0.1 * abs(value or 0) * (key == "wall_s"), "a tenth of the time" if key == "wall_s" else "none"
    scores = record.get("scores", {}).get(split, {})
    before, after = scores.get("before", {}), scores.get("after", {})
    if name.startswith("gain"):
        k = name.partition("@")[2] or "1"
        b, a = before.get(f"pass@{k}"), after.get(f"pass@{k}")
        noise = 2 * math.hypot((before.get("se") or {}).get(k) or 0, (after.get("se") or {}).get(k) or 0)
        return None if a is None or b is None else a - b, noise, "two standard errors of both evaluations, unpaired"
    if "pass@" in name:
        return after.get(name), 2 * ((after.get("se") or {}).get(name.partition("@")[2]) or 0), "two standard errors"
    value = after.get(name)
    if name.endswith("greedy") and value is not None:
        n = (record.get("config") or {}).get("limit") or 1
        return value, 2 * math.sqrt(value * (1 - value) / n), f"two binomial standard errors of {n} problems"
    return value, 0.0, "none recorded"


def reconcile(prediction, record):
    """A parsed prediction and the `run` record -> {"outcome": hit, within noise, miss or open, "value", "noise", ..}"""
    value, noise, what = predicted_value(prediction["key"], record or {})
    out = {"value": value, "noise": noise, "noise_is": what}
    if value is None:
        why = f"the record ({record.get('status')}) holds no {prediction['key']}" if record else "the run has no end"
        return {**out, "outcome": "open", "why": why}
    want, op = prediction["value"], prediction["op"]
    off = abs(value - want) - prediction["within"] if op == "=" else value - want if op in ("<", "<=") else want - value
    hit = off < 0 if op in "<>" else off <= 1e-12
    return {**out, "outcome": "hit" if hit else "within noise" if off <= noise else "miss"}


def ledger(records):
    """-> rows of the prediction table, and one sentence."""
    ends, lessons, own, started = {}, {}, defaultdict(list), set()
    for i, r in enumerate(records):   # a later run of the same name, in another folder, has predictions of its own
        name = r.get("run_id")
        if r.get("kind") == "prediction":
            if name in started:
                own[name] = []
                started.discard(name)
            own[name].append(i)
        elif r.get("kind") == "start":
            started.add(name)
        elif r.get("kind") == "run":   # the first good end counts: with more steps it is another run's prediction
            ends.update({j: r for j in own[name] if (ends.get(j) or {}).get("status") != "ok"})
        elif r.get("what") == "lesson":
            lessons.update({j: r.get("notes") for j in own[name]})
    rows = []
    for i, p in ((i, r) for i, r in enumerate(records) if r.get("kind") == "prediction"):
        try:
            got = reconcile(common.parse_prediction(p["text"]), ends.get(i))
        except (UserError, KeyError, TypeError, AttributeError) as e:
            got = {"outcome": "open", "value": None, "noise": 0.0, "noise_is": "", "why": f"not readable ({e})"}
        lesson = lessons.get(i) or ("a lesson is owed (--lesson)" if got["outcome"] == "miss" else "")
        rows.append([p.get("run_id"), (p.get("time") or "")[:16], p.get("text"), number_text(got["value"]),
                     got["outcome"], f"{got['noise']:.3g}, {got['noise_is']}", got.get("why") or lesson])
    count = Counter(r[4] for r in rows)
    closed = len(rows) - count["open"]
    return rows, (f"{len(rows)} predictions: {count['hit']} hit, {count['within noise']} within noise, {count['miss']} "
                  f"miss, {count['open']} open" + (f"; hit rate {count['hit'] / closed:.2f}" if closed else ""))


def unended(records):
    """-> run_ids whose last start has no end after it; {run_id: starts that the next start followed without an end}."""
    state, again = {}, Counter()
    for r in records:
        if r.get("kind") in ("start", "run"):
            key = r.get("run_id"), (r.get("config") or {}).get("output_dir")   # two studies may share a name
            again[key[0]] += r["kind"] == "start" and state.get(key) == "start"
            state[key] = r["kind"]
    return [run for (run, _), kind in state.items() if kind == "start"], +again


def about_starts(records):
    """Lines on starts without an end."""
    lost, again = unended(records)
    out = [f"lost or still running: {run} has a start and no end" for run in lost]
    if again:
        out.append("begun again without an end (a resume counts the time before it, a new start does not): "
                   + ", ".join(f"{run}{f' x {n}' if n > 1 else ''}" for run, n in again.items()))
    return out


def check_labbook(path):
    """Prints the state of the chain, lost runs and the ledger; -> exit code, 1 when the chain is broken."""
    if not Path(path).exists():
        raise UserError(f"--labbook {path}: no such file")
    records, problems = common.read_labbook(path)
    kinds = Counter(r.get("kind") for r in records)
    print(f"{path}: {len(records)} records ({', '.join(f'{n} {k}' for k, n in kinds.items()) or 'none'})")
    print("\n".join(problems) or "the chain is whole")
    for line in about_starts(records):
        print(line)
    rows, said = ledger(records)
    print(said if rows else "no predictions")
    for r in rows:
        print(f"  {r[4]:12s} {r[1]} {r[0]}: {r[2]} (got {r[3]}; noise {r[5]}) {r[6]}".rstrip())
    return 1 if problems else 0


def add_lesson(path, text):
    run_id, colon, lesson = (x.strip() for x in text.partition(":"))
    if not colon or not lesson or not Path(path).exists():
        raise UserError(f"--lesson {text!r}: expected 'RUN: what was learned' and a lab book that holds the prediction")
    if run_id not in {r.get("run_id") for r in common.read_labbook(path)[0] if r.get("kind") == "prediction"}:
        raise UserError(f"--lesson: {path} holds no prediction for a run {run_id!r}")
    common.append_record(path, {"kind": "verdict", "what": "lesson", "run_id": run_id, "notes": lesson,
                                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, f"- lesson of {run_id}: {lesson}")
    print(f"recorded in {path}")


# ----------------------------------------------------------------------------------------------------------------------
# Findings of the documents: claims with a direction, each judged against its noise

NOT_MEASURED = ": not measured in these runs"


def read_off(text, spread, seeds, good):
    """A claim that no direction decides -> as claim(): one run cannot tell."""
    if seeds < 2:
        return f"{text}, {seeds_in_words(seeds)}", spread, seeds, "cannot be told"
    return text, spread, seeds, "holds" if good else "fails"


def claim(words, effect, want):
    """
    One claim -> (words with the numbers, spread, seeds, outcome). want: up, down, flat, not up, not down, or a number
    that the size should not exceed.
    """
    if effect is None:
        return words + NOT_MEASURED, None, 0, "cannot be told"
    m, floor = effect.mean, effect.floor
    text = f"{words}: {m:+.3g}, noise {floor:.2g}"
    if effect.seeds < 2 or (effect.spread is None and effect.se is None):
        return f"{text}, {seeds_in_words(effect.seeds)}", effect.spread, effect.seeds, "cannot be told"
    sign = 0 if abs(m) <= floor else 1 if m > 0 else -1
    if isinstance(want, (int, float)):
        outcome = "holds" if abs(m) <= want else "fails" if abs(m) > want + floor else "cannot be told"
    elif want == "flat":
        outcome = "fails" if sign else "holds"
    elif want.startswith("not"):
        outcome = "fails" if sign == (1 if want == "not up" else -1) else "holds"
    else:
        wanted = 1 if want == "up" else -1
        outcome = "holds" if sign == wanted else "fails" if sign == -wanted else "cannot be told"
    return text, effect.spread, effect.seeds, outcome


def findings(s):
    """A study -> [(F, finding, [claims])]. Arms that did not run leave their claims untold."""
    IN, OUT = s.inside, s.outside
    PEN2, PEN5 = "grpo_length_penalty:0.2", "grpo_length_penalty:0.5"
    SIX = ["rft_shortest", "rft_shortest_braked", "grpo", PEN2, PEN5, "opd"]
    TOP = max((top_k(r) for r in s.base.values() if r["split"] == IN), default=1)

    def ch(arm, key, want, split=IN, start=True):   # a change by training
        c = s.find(arm)
        return claim(f"{arm} {key} on {split}", change(s, c, split, key, start) if c and split else None, want)

    def df(a, b, key, want, split=IN):              # one arm against another
        x, y = s.find(a), s.find(b)
        effect = against(s, x, y, split, key) if x and y and split else None
        return claim(f"{a} minus {b}, {key} on {split}", effect, want)

    def per_run(arm, fn):                           # a number of each run's own records
        c = s.find(arm)
        values = [v for v in (fn(r) for r in c.runs) if v is not None] if c else []
        return Effect(float(np.mean(values)), spread_of(values), None, len(values)) if values else None

    def minus(a, b):
        known = a and b and [x for x in (a.spread, b.spread) if x is not None]
        return a and b and Effect(a.mean - b.mean, max(known) if known else None,
                                  math.hypot(a.se or 0, b.se or 0), min(a.seeds, b.seeds))

    def first_quarter(r):                           # share of the loss's fall that comes in the first quarter
        loss = [m["loss"] for m in r.metrics if m.get("loss") is not None]
        if len(loss) >= 12 and (q := len(loss) // 4):
            a, b, c = np.mean(loss[:q // 3 or 1]), np.mean(loss[q:q + q // 2 + 1]), np.mean(loss[-q:])
            return float((a - b) / (a - c)) - 0.5 if a > c else -0.5

    def metric(key, part=slice(None)):
        def of(r):
            x = [m[key] for m in r.metrics if m.get(key) is not None][part]
            return float(np.mean(x)) if x else None
        return of

    def trend(r):
        got = slope([(m["step"], m.get("reward")) for m in r.metrics])
        return got and got[0]

    def flips(arm):
        c, out = s.find(arm), []
        for b, a in zip(*c.rows(IN, s.base.get(IN))) if c else ():
            if b.get("greedy_correct") and a.get("greedy_correct"):
                out.append(mcnemar(b["greedy_correct"], a["greedy_correct"]))
        if not out:
            return None
        rates = [(f["repairs"] / max(1, f["wrong"]), f["breakages"] / max(1, f["right"])) for f in out]
        (r, b), f = np.mean(rates, 0), out[0]
        se = math.sqrt(r * (1 - r) / max(1, f["wrong"]) + b * (1 - b) / max(1, f["right"]))
        return Effect(float(r - b), spread_of([x - y for x, y in rates]), se, len(out))

    def bands():
        rows = [(c, c.rows(IN, s.base.get(IN))[1]) for c in s.conditions if not c.control]
        got = [common.interval(np.mean([vector(r, "top") for r in a], 0))[:2] for c, a in rows if a]
        if len(got) < 2:
            return claim(f"bands of pass@{TOP} overlap", None, "up")
        room = min(h for _, h in got) - max(l for l, _ in got)
        return read_off(f"{len(got)} bands of pass@{TOP} overlap by {room:+.3f}", None,
                        min(len(a) for _, a in rows if a), room >= 0)

    def spread_and_gain():
        e = (c := s.find("grpo")) and change(s, c, IN, "pass@1")
        if not e or e.seeds < 3:
            return "spread of grpo over three or more seeds", None, e.seeds if e else 0, "cannot be told"
        good = e.spread >= abs(e.mean) / 2 and e.spread > e.se
        return (f"spread {e.spread:.3f}, gain {e.mean:+.3f}, se {e.se:.3f}", e.spread, e.seeds,
                "holds" if good else "fails")

    def screened():
        e = per_run("grpo", metric("no_spread", slice(0, 10)))
        pool = any(r.args.get("pool") for c in s.conditions for r in c.runs)
        if not e or not pool:
            return "groups without spread at the start, screened pool", None, e.seeds if e else 0, "cannot be told"
        end = per_run("grpo", metric("no_spread", slice(-10, None)))
        return read_off(f"share of groups without spread {e.mean:.3f} in the first 10 steps, {end.mean:.3f} in the "
                        f"last 10", e.spread, e.seeds, e.mean < 0.05)

    def brake():
        e = per_run("rft_shortest_braked", metric("kl", slice(-50, None)))
        if not e:
            return claim("KL of the braked arm", None, "flat")
        return read_off(f"KL {e.mean:.4f} nats a token in the last 50 steps (.003 there)", e.spread, e.seeds,
                        e.mean < 0.01)

    gain_in, gain_out = [(c := s.find("grpo")) and x and change(s, c, x, "pass@1") for x in (IN, OUT)]
    opd = (c := s.find("opd")) and change(s, c, IN, "pass@1")
    return [
        (1, "shortest-answer RFT shortens; rft_random tells whether shortness does it",
         [ch("rft_shortest", "median_length_right", "down"),
          df("rft_shortest", "rft_random", "median_length_right", "down")]),
        (2, "GRPO has the largest pass@1 gain", [df("grpo", a, "pass@1", "up") for a in SIX if a != "grpo"]),
        (3, "length penalty .5 lowers tokens per solved most",
         [df(PEN5, a, "tokens_per_solved", "down") for a in SIX if a != PEN5]),
        (4, "opd: loss falls early, entropy flat, pass@1 +.014 or less",
         [claim("share of opd's loss fall in the first quarter, above one half", per_run("opd", first_quarter), "up"),
          ch("opd", "entropy", "flat"), claim("opd pass@1 gain above .014", opd and opd._replace(mean=opd.mean - 0.014),
                                              "not up")]),
        (5, "entropy: RFT up, GRPO and penalty down, opd flat; the same outside",
         [ch(a, "entropy", w, x) for x in (IN, OUT) for a, w in
          (("rft_shortest", "up"), ("rft_shortest_braked", "up"), ("grpo", "down"), (PEN2, "down"), (PEN5, "down"),
           ("opd", "flat"))]),
        (6, f"gap pass@{TOP} - pass@1: RFT widens, GRPO narrows, opd flat",
         [ch(a, "gap", w) for a, w in (("rft_shortest", "up"), ("rft_shortest_braked", "up"), ("grpo", "down"),
                                       ("opd", "flat"))]),
        (7, "distinct final answers: RFT up, GRPO down",
         [ch(a, "distinct_answers", w) for a, w in (("rft_shortest", "up"), ("rft_shortest_braked", "up"),
                                                    ("grpo", "down"))]),
        (8, f"by k = {TOP} all bands overlap", [bands()]),
        (9, "a brake of .05 is weak: within 1 point and 2 tokens of the unbraked arm, KL about .003",
         [df("rft_shortest_braked", "rft_shortest", "pass@1", 0.01),
          df("rft_shortest_braked", "rft_shortest", "mean_length", 2), brake()]),
        (10, "outside, GRPO leads at k = 1 and opd at k = 8",
         [df("grpo", a, "pass@1", "up", OUT) for a in SIX if a != "grpo"]
         + [df("opd", a, "pass@8", "up", OUT) for a in SIX if a != "opd"]),
        (11, "length changes carry over: RFT shorter on both, opd longer on both",
         [ch(a, "mean_length", w, x) for x in (IN, OUT) for a, w in
          (("rft_shortest", "down"), ("rft_shortest_braked", "down"), ("opd", "up"))]),
        (12, "right answers are shorter than wrong ones only for the penalty and opd",
         [ch(a, "length_gap", "down", start=False) for a in (PEN2, PEN5, "opd")]
         + [ch(a, "length_gap", "not down", start=False) for a in ("grpo", "rft_shortest", "rft_shortest_braked")]),
        (13, "training reward shows no trend though accuracy rises",
         [claim("slope of grpo's reward per 100 steps", per_run("grpo", trend), "flat"), ch("grpo", "pass@1", "up")]),
        (14, "backward a piece at a time more than halves the peak memory; forward in pieces saves nothing",
         [("no training run tells: bench.py memory measures the three ways", None, 0, "cannot be told")]),
        (15, "groups without spread give no gradient; screening leaves none at the start", [screened()]),
        (17, "the gain on the same family is larger than on a different one",
         [claim("grpo's gain inside minus outside", minus(gain_in, gain_out), "up")]),
        (18, "the spread over seeds is comparable to the gain, and larger than the standard error",
         [spread_and_gain()]),
        (20, "GRPO with a mean per answer lengthens answers, wrong ones most",
         [ch("grpo", "mean_length_wrong", "up"), ch("grpo", "wrong_minus_right", "up"),
          df("grpo", "dr_grpo", "mean_length_wrong", "up")]),
        (30, f"pass@1 rises, pass@{TOP} does not move", [ch("grpo", "pass@1", "up"), ch("grpo", "top", "flat")]),
        (31, "greedy rises less than sampled, and the model grows surer",
         [ch("grpo", "greedy_lead", "down"), ch("grpo", "mean_logp", "up")]),
        (33, "repairs outnumber breakages in greedy answers",
         [claim("grpo's repair rate minus breakage rate", flips("grpo"), "up")]),
    ]


def overall(outcomes):
    """fails when one claim fails, holds when all hold, else it cannot be told."""
    if "fails" in outcomes:
        return "fails"
    return "holds at this scale" if set(outcomes) == {"holds"} else "cannot be told"


# ----------------------------------------------------------------------------------------------------------------------
# Tables: {"title", "note", "head", "rows"}; a cell is a text, or (text, fractional change) where colour carries it

def number_text(x, digits=3):
    if x is None or isinstance(x, str):
        return x or "-"
    return f"{x:.{digits}f}" if abs(x) < 10 else f"{x:.1f}"


def last_mean(study, c, split, key):
    """Mean over seeds of a number of the last evaluation; for c None, of the untrained model."""
    rows = [study.base[split]] if c is None and split in study.base else \
        c.rows(split, study.base.get(split))[1] if c else []
    values = [v for v in (scalar(r, key) for r in rows) if v is not None]
    return float(np.mean(values)) if values else None


def final_columns(study):
    """[(split, key, heading)] of the final table: pass@k inside and outside, token cost and entropy inside."""
    out = []
    for split, wanted in ((study.inside, ("1", "8", "32")), (study.outside, ("1", "8"))):
        have = study.base.get(split, {}).get("pass_at", {})
        out += [(split, f"pass@{k}", f"pass@{k} {split}") for k in wanted if k in have]
    return out + [(study.inside, "tokens_per_solved", f"tokens per solved {study.inside}"),
                  (study.inside, "entropy", f"entropy {study.inside}")]


def final_table(study):
    columns = final_columns(study)
    rows = []
    for c in [None, *study.conditions]:
        cells = []
        for split, key, _ in columns:
            x, base = last_mean(study, c, split, key), last_mean(study, None, split, key)
            cells.append((number_text(x), (x - base) / base if c and x is not None and base else None))
        rows.append([c.label if c else "untrained", str(len(c.runs)) if c else "-", *cells])
    return {"title": "Final table", "head": ["arm", "seeds", *[h for _, _, h in columns]], "rows": rows,
            "note": "Means over seeds at the last evaluation. Colour on the page: fractional change against the "
                    "untrained row (blue up, orange down, full at 25%)."}


def runs_table(study, records):
    IN, OUT, rows = study.inside, study.outside, []
    families = [x for x in (IN, OUT) if x]
    head = ["run", "seed", "status"] + [f"{k} {x}" for x in families for k in ("pass@1 (se)", "lenient")] + \
        ["greedy", "mean length", "truncated", "steps", "wall clock (s)"]

    def cells(by_split):
        out = []
        for x in families:
            r = by_split.get(x)
            out += [f"{r['pass_at']['1']:.3f} ({number_text(r['se'].get('1'))})", number_text(scalar(r, "lenient@1"))] \
                if r else ["-", "-"]
        r = by_split.get(IN) or {}
        return out + [number_text(r.get(k)) for k in ("greedy_pass", "mean_length", "truncated")]
    rows.append(["untrained", "-", "-", *cells(study.base), "0", "-"])
    for c in study.conditions:
        for r in c.runs:
            made = generation_s(records, r)
            wall = number_text((r.record.get("budget") or {}).get("wall_s"))
            steps = max([e["step"] for rows_ in r.evals.values() for e in rows_] + [0])
            rows.append([c.label, str(r.seed), r.status, *cells({x: r.final(x) for x in families}), str(steps),
                         wall if made is None else f"{made:.1f} generation + {wall} SFT"])
        if len(c.runs) > 1:
            spreads = []
            for x in families:
                a = c.rows(x, study.base.get(x))[1]
                spreads += [number_text(spread_of([scalar(r, k) for r in a]) if a else None) for k in
                            ("pass@1", "lenient@1")]
            rows.append([f"{c.label}, {'range' if len(c.runs) == 2 else 'spread'}", f"{len(c.runs)}", "-", *spreads,
                         *["-"] * 5])
    for r in study.lost:
        why = f"{r.status}{', tuning' if r.seed >= TUNING else ''}"
        rows.append([f"{r.arm} ({r.name})", str(r.seed), why, *cells({x: r.final(x) for x in families}),
                     str(len(r.metrics)), number_text((r.record.get("budget") or {}).get("wall_s"))])
    return {"title": "Runs", "head": head, "rows": rows,
            "note": f"se: over problems, of one evaluation; spread: highest minus lowest seed. Greedy, length and "
                    f"truncated are on {IN}. Failed, unfinished and tuning runs stay as rows and enter no verdict."}


def generation_s(records, run):
    """Seconds of the teacher's answers that a run was trained on, by the `data` record of these files; else None."""
    def files(data, *keys):   # another teacher's machine may have made the same bytes at another place
        return {tuple(d.get(k) for k in keys) for d in data or [] if d.get("sha256")}
    made = [r for r in records if r.get("kind") == "data" and r.get("script") == "data/distil/prepare"]   # no pool's
    for keys in (("path", "sha256"), ("sha256",)):   # by hash alone where the folder has moved
        found = [r for r in made if files(run.data, *keys) & files(r.get("data"), *keys)]
        if found:   # the last one: a distillation that was killed went on, and its budget counts all starts
            return (found[-1].get("budget") or {}).get("wall_s")
    return None


def verdict_table(study, verdicts, margins):
    rows = []
    for c in study.conditions:
        for split in study.splits:
            v = verdicts.get((c.label, split))
            if not v:
                continue
            if v["code"] == "refused":
                rows.append([c.label, split, str(v["seeds"]), *["-"] * 7, f"refused: {', '.join(v['why'])}", "-"])
                continue
            flips = "; ".join(f"{f['repairs']} up {f['breakages']} down p {f['p']:.3f}" for f in v["flips"]) or "-"
            margin, said = margins.get((c.label, split), (None, "-"))
            level = margin_level(margin, v) if margin else said
            rows.append([c.label, split, str(v["seeds"]), number_text(v["before"]), number_text(v["after"]),
                         f"{v['gain']:+.3f} [{v['ci95'][0]:+.3f}, {v['ci95'][1]:+.3f}]", number_text(v["spread"]),
                         number_text(2 * v["se"]), f"{v['lenient']['gain']:+.3f}", flips,
                         CODES[v["code"]] + (", a control gains too" if v.get("control") else "")
                         + ("" if v["seeds"] > 2 else f" ({seeds_in_words(v['seeds'])})"), level])
    return {"title": "Verdicts", "rows": rows,
            "head": ["arm", "split", "seeds", "before", "after", "gain [95%]", "spread", "2 se", "lenient gain",
                     "greedy flips, McNemar", "verdict", "margin"],
            "note": "Gain: mean over seeds, after minus before. [95%]: paired bootstrap over problems, seeds held "
                    "fixed. 2 se: two standard errors over problems of the paired difference. A gain counts when it "
                    "exceeds both spread and 2 se, strict and lenient."}


CODES = {"effect": "an effect", "worse": "a loss", "format": "format", "format lost": "format (a loss)",
         "lenient": "lenient reading alone", "spread": "the spread exceeds the gain", "error": "inside two se",
         "uninformative": "uninformative", "refused": "refused"}


def comparison_table(study):
    rows = []
    for a, b in combinations(study.conditions, 2):
        for split in [x for x in (study.inside, study.outside) if x]:
            p = compare(study, a, b, split)
            if p and p["code"] == "refused":
                rows.append([p["a"], p["b"], split, "-", "-", f"refused: {', '.join(p['why'])}", "-",
                             ", ".join(p["keys"])])
            elif p:
                few = f" ({seeds_in_words(p['seeds'])})" if p["seeds"] < 3 else ""
                rows.append([p["a"], p["b"], split, f"{p['gain']:+.3f} [{p['ci95'][0]:+.3f}, {p['ci95'][1]:+.3f}]",
                             number_text(p["floor"]), p["code"] + few, p["explains"], ", ".join(p["keys"])])
    return {"title": "Comparisons", "rows": rows, "folded": True,
            "head": ["A", "B", "split", "A - B [95%]", "noise", "A is", "what it can say", "settings that differ"],
            "note": "pass@1 at the last evaluation, the same problems. [95%]: paired bootstrap over problems. Noise: "
                    "the largest of both spreads and two paired standard errors. Of many comparisons some are apart by "
                    "chance."}


def control_table(study):
    rows = []
    for c in [None] + [c for c in study.conditions if c.control or c.arm == "grpo"]:
        rows.append([c.label if c else "untrained"] + [number_text(last_mean(study, c, x, k)) for x in
                    (study.inside, study.outside) if x for k in ("pass@1", "greedy", "lenient@1")])
    return {"title": "Controls", "rows": rows if any(c.control for c in study.conditions) else [],
            "head": ["arm"] + [f"{k} {x}" for x in (study.inside, study.outside) if x for k in
                               ("pass@1", "greedy", "lenient@1")],
            "note": "A control that falls far below untrained was destroyed by its learning rate, and proves nothing."}


def budget_table(study, records):
    rows, again = [], unended(records)[1]
    for c in study.conditions:
        own = {json.dumps(settings(r), sort_keys=True, default=str) for r in c.runs}
        lost = [r for r in study.lost if json.dumps(settings(r), sort_keys=True, default=str) in own]
        b = [r.record.get("budget") or {} for r in c.runs]

        def mean(key):
            values = [x[key] for x in b if x.get(key) is not None]
            return number_text(float(np.mean(values)), 2) if values else "-"
        wasted = sum((r.record.get("budget") or {}).get("wall_s") or 0 for r in lost)
        starts = sum(again.get(r.record.get("run_id"), 0) for r in c.runs)
        rows.append([c.label, *[mean(k) for k in ("prompts", "rollouts", "tokens_sampled", "tokens_trained", "wall_s")],
                     f"{wasted:.1f} ({len(lost)})" + f", {starts} starts without an end" * (starts > 0),
                     mean("peak_mem_gib"), mean("peak_rss_gib"), mean("cost")])
    return {"title": "Budget", "rows": rows, "folded": True,
            "head": ["arm", "prompts", "rollouts", "tokens sampled", "tokens trained", "wall clock (s)",
                     "failed, lost and tuning (s, runs)", "GPU peak (GiB)", "RAM peak (GiB)", "cost"],
            "note": "Means over seeds; the failed ones in all. A run that was killed left no time; one that was begun "
                    "anew counts its last start alone, and the lab book has the others."}


def findings_table(study):
    rows = []
    for number, text, claims in findings(study):
        seeds = [c[2] for c in claims if c[2]]
        spreads = [c[1] for c in claims if c[1] is not None]
        outcomes = [c[3] for c in claims]
        numbers = "; ".join(f"{c[0]} ({c[3]})" if len(claims) > 1 else c[0] for c in claims)
        if all(c[0].endswith(NOT_MEASURED) for c in claims):   # none of its arms ran: said once
            numbers = NOT_MEASURED[2:]
        rows.append([f"F{number}", text, numbers,
                     number_text(max(spreads) if spreads else None), str(min(seeds)) if seeds else "0",
                     overall(outcomes)])
    return {"title": "Findings", "rows": rows,
            "head": ["F", "finding of the document", "numbers", "largest spread", "seeds", "verdict"],
            "note": "Each number is a mean over seeds, its noise the larger of spread and two standard errors over "
                    "problems (the spread alone where a number is no mean over problems). A direction counts beyond "
                    "its noise; 'fails' is a number beyond it the other way, or one that moves where none should. "
                    "Where no change is expected, a large noise hides much."}


def sentences(study, verdicts, margins, records):
    """One sentence of three clauses an arm: the same family, a different one, the baseline."""
    out, baselines = [], [c for c in study.conditions if c.arm == "sft" and not c.control]
    for c in study.conditions:
        if c.control or c in baselines and len(baselines) < len(study.conditions):
            continue
        # LoRA against LoRA, all weights against all weights: the baseline that differs in the fewest settings
        baseline = min((b for b in baselines if b is not c), default=None,
                       key=lambda b: (b.runs[0].args.get("lora_rank") != c.runs[0].args.get("lora_rank"),
                                      len(differing(b.runs[0], c.runs[0]))))
        steps, rows = c.runs[0].args.get("max_steps"), c.runs[0].data[0].get("rows") if c.runs[0].data else None
        clauses = []
        for family, split in (("the same family", study.inside), ("a different family", study.outside)):
            v = verdicts.get((c.label, split)) if split else None
            if v is None:
                clauses.append(f"on {family}, nothing was measured")
            elif v["code"] == "refused":
                clauses.append(f"on {family} the comparison is refused ({', '.join(v['why'])})")
            else:
                margin, _ = margins[c.label, split]
                clauses.append(f"on {family}, {in_words(v, split)}" + (f" [{v['control']}]" if v.get("control") else "")
                               + (f" [by the margin: {margin_level(margin, v)}]" if margin else ""))
        pair = baseline and compare(study, c, baseline, study.inside)
        if not pair:
            clauses.append("and there is no baseline (train_sft.py on a teacher's answers) among these runs")
        elif pair["code"] == "refused":
            clauses.append(f"and the comparison with the baseline is refused ({', '.join(pair['why'])})")
        else:
            walls = [np.mean([(r.record.get("budget") or {}).get("wall_s") or 0 for r in x.runs])
                     for x in (c, baseline)]
            made = generation_s(records, baseline.runs[0])
            few = f", {seeds_in_words(pair['seeds'])}" if pair["seeds"] < 3 else ""
            clauses.append(f"and against {baseline.label} it is {pair['code']} ({pair['gain']:+.3f}, noise "
                           f"{pair['floor']:.3f}{few}; {walls[0]:.0f} s against "
                           + (f"{made:.0f} s of generation and " if made is not None else "") + f"{walls[1]:.0f} s: "
                           f"wall clock, which is not compute; {pair['explains']})")
        short = [f"{steps} steps (tools advise 300)"] if steps and steps < 300 else [f"{steps} steps"] if steps else []
        short += [f"{rows} problems" + (" (500)" if rows < 500 else "")] if rows else []
        clipped = [m["clip_frac"] for r in c.runs for m in r.metrics if m.get("clip_frac") is not None]
        if clipped and np.mean(clipped) > 0.1:
            short.append(f"the clip took the gradient of {np.mean(clipped):.0%} of the tokens")
        first, lever, rest = "; ".join(clauses).partition(f"; {LEVERS}")   # the levers are named once a sentence
        out.append(f"{c.label}, {seeds_in_words(len(c.runs))}, {', '.join(short)}: {first}{lever}"
                   f"{rest.replace(lever, '') if lever else ''}.")
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Figures: each function returns (figure, what its interval means), or raises Missing with the reason

class Missing(Exception):
    pass


def plots():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.25, "lines.linewidth": 1.6, "lines.markersize": 5, "svg.hashsalt": "nanopost",
                         "axes.titlesize": 9.5, "figure.constrained_layout.use": True})
    return plt


def panels(count, height=2.9):
    columns = 2 if count == 4 else 3
    fig, axes = plots().subplots(math.ceil(count / columns), min(columns, count), squeeze=False,
                                 figsize=(min(columns, count) * 3.6 + 0.2, math.ceil(count / columns) * height + 0.7))
    for ax in axes.flat[count:]:
        ax.axis("off")
    return fig, list(axes.flat[:count])


def legend(fig, axes):
    """One legend a figure, below it, each arm once."""
    found = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            found.setdefault(label, handle)
    fig.legend(found.values(), found.keys(), loc="outside lower center", fontsize=8, frameon=False, handlelength=3,
               ncols=min(4, max(1, int(fig.get_figwidth() / 2.2))))


def by_step(study, c, split, key):
    """-> {step: values over seeds}; step 0 is shared where a run has none of its own."""
    out = defaultdict(list)
    for r in c.runs:
        rows = r.evals.get(split, [])
        if rows and not r.base(split) and split in study.base:
            rows = [{**study.base[split], "step": 0}, *rows]
        for row in rows:
            if scalar(row, key) is not None:
                out[row["step"]].append(scalar(row, key))
    return dict(sorted(out.items()))


def metric_by_step(c, key):
    """The same from metrics.jsonl."""
    out = defaultdict(list)
    for r in c.runs:
        for m in r.metrics:
            if m.get(key) is not None:
                out[m["step"]].append(m[key])
    return dict(sorted(out.items()))


def draw_band(ax, c, points):
    """points {x: values over seeds}: the mean as a line, lowest to highest seed as a band."""
    if not points:
        return
    x, (colour, line, marker) = list(points), c.look
    ax.plot(x, [np.mean(points[i]) for i in x], color=colour, linestyle=line, marker=marker if len(x) < 30 else "",
            label=c.label)
    if any(len(v) > 1 for v in points.values()):
        ax.fill_between(x, [min(points[i]) for i in x], [max(points[i]) for i in x], color=colour, alpha=0.13,
                        linewidth=0)


BAND = "Line: mean over seeds; band: lowest to highest seed"


def over_steps(study, wanted):
    """Panels of evaluations over training. wanted: [(split, key, title)]."""
    wanted = [w for w in wanted if w[0] and any(by_step(study, c, w[0], w[1]) for c in study.conditions)]
    if not wanted:
        raise Missing("no evaluation holds these numbers")
    fig, axes = panels(len(wanted))
    for ax, (split, key, title) in zip(axes, wanted):
        for c in study.conditions:
            draw_band(ax, c, by_step(study, c, split, key))
        if (base := last_mean(study, None, split, key)) is not None:
            ax.axhline(base, color="#000000", linestyle=":", linewidth=1, label="untrained")
        ax.set(title=title, xlabel="step")
    legend(fig, axes)
    return fig, BAND


def fig_length_accuracy(s, _):
    fig, (ax,) = panels(1, height=3.6)
    fig.set_size_inches(6.4, 4.6)
    for c in s.conditions:
        x, y = by_step(s, c, s.inside, "mean_length"), by_step(s, c, s.inside, "pass@1")
        steps = [i for i in x if i in y]
        colour, line, marker = c.look
        ax.plot([np.mean(x[i]) for i in steps], [np.mean(y[i]) for i in steps], color=colour, linestyle=line,
                marker=marker, markersize=4, label=c.label)
        if steps:
            ax.plot(np.mean(x[steps[-1]]), np.mean(y[steps[-1]]), color=colour, marker=marker, markersize=10)
    ax.set(xlabel=f"mean length on {s.inside} (tokens)", ylabel="pass@1")
    legend(fig, [ax])
    return fig, "One point an evaluation, mean over seeds, the last one large; no interval"


def fig_tokens(s, _):
    return over_steps(s, [(s.inside, "median_length_right", "median length of right answers"),
                          (s.inside, "tokens_per_solved", "tokens per solved problem")])


def fig_entropy(s, _):
    return over_steps(s, [(x, "entropy", f"entropy on {x} (nats a token)") for x in (s.inside, s.outside)])


def fig_opd(s, _):
    arms = [c for c in s.conditions if c.arm == "opd"]
    if not arms:
        raise Missing("no arm opd")
    fig, axes = panels(2)
    for ax, key, title in zip(axes, ("loss", "entropy"), ("loss: KL(student, teacher)", "entropy in training (nats)")):
        for c in arms:
            draw_band(ax, c, metric_by_step(c, key))
        ax.set(title=title, xlabel="step")
    legend(fig, axes)
    return fig, BAND


def fig_passk(s, _):
    K = top_k(s.base[s.inside]) if s.inside in s.base else 1
    ks = sorted({1, min(8, K), K})
    wanted = [(s.inside, f"pass@{k}", f"pass@{k} on {s.inside}") for k in ks]
    if K > 1:
        wanted.append((s.inside, "gap", f"pass@{K} - pass@1"))
    return over_steps(s, wanted)


def fig_gap_parts(s, _):
    parts = [(c, change(s, c, s.inside, "pass@1"), change(s, c, s.inside, "top")) for c in s.conditions]
    parts = [p for p in parts if p[1]]
    if not parts:
        raise Missing("no arm was evaluated before and after")
    fig, (ax,) = panels(1)
    fig.set_size_inches(7, 0.38 * len(parts) + 1.7)
    for i, (_, one, top) in enumerate(parts):
        ax.barh(i + 0.18, -one.mean, 0.34, color="#0072B2", label="by pass@1 (minus its gain)" if i == 0 else None)
        ax.barh(i - 0.18, top.mean, 0.34, color="#E69F00", hatch="//", edgecolor="white",
                label="by the highest k (its gain)" if i == 0 else None)
        ax.plot(top.mean - one.mean, i, "kD", markersize=5, label="change of the gap" if i == 0 else None)
    ax.set_yticks(range(len(parts)), [p[0].label for p in parts])
    ax.axvline(0, color="black", linewidth=0.8)
    ax.invert_yaxis()
    ax.set(xlabel=f"change of pass@{top_k(s.base[s.inside])} - pass@1 on {s.inside}")
    legend(fig, [ax])
    return fig, "Means over seeds, last evaluation minus step 0; no interval"


def fig_final_passk(s, _):
    splits = [x for x in (s.inside, s.outside) if x in s.base]
    fig, axes = panels(len(splits), height=3.2)
    for ax, split in zip(axes, splits):
        ks = sorted(map(int, s.base[split]["pass_at"]))
        curves = [("untrained", LOOKS["untrained"], [s.base[split]])]
        curves += [(c.label, c.look, c.rows(split, s.base[split])[1]) for c in s.conditions]
        for label, (colour, line, marker), rows in curves:
            rows = [r for r in rows if set(map(int, r["pass_at"])) >= set(ks)]
            if rows:
                v = [np.mean([vector(r, f"pass@{k}") for r in rows], 0) for k in ks]
                band = [common.interval(x) for x in v]
                ax.plot(ks, [x.mean() for x in v], color=colour, linestyle=line, marker=marker, label=label)
                ax.fill_between(ks, [b[0] for b in band], [b[1] for b in band], color=colour, alpha=0.08, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ks, list(map(str, ks)))
        ax.set(title=f"pass@k on {split}, last evaluation", xlabel="k")
    legend(fig, axes)
    return fig, "Band: 95% interval over problems of the mean over seeds (bootstrap; Wilson outside .1 to .9)"


def fig_distinct(s, _):
    return over_steps(s, [(x, "distinct_answers", f"distinct answers a problem, {x}") for x in (s.inside, s.outside)])


def in_against_out(s, keys, titles, unit):
    if not s.outside:
        raise Missing("only one family was evaluated")
    fig, axes = panels(len(keys), height=3.4)
    drawn = 0
    for ax, key, title in zip(axes, keys, titles):
        for c in s.conditions:
            x, y = change(s, c, s.inside, key), change(s, c, s.outside, key)
            if x and y:
                colour, _, marker = c.look
                ax.errorbar(x.mean, y.mean, xerr=2 * (x.se or 0), yerr=2 * (y.se or 0), color=colour, marker=marker,
                            markersize=7, linestyle="none", elinewidth=0.8, label=c.label)
                drawn += 1
        ax.axhline(0, color="black", linewidth=0.6)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.axline((0, 0), slope=1, color="#999999", linewidth=0.8, linestyle=":")
        ax.set(title=title, xlabel=f"{s.inside}{unit}", ylabel=f"{s.outside}{unit}")
    if not drawn:
        raise Missing("no arm was evaluated before and after on both families")
    legend(fig, axes)
    return fig, "Bars: two paired standard errors over problems each way, seeds held fixed; dotted: equal change"


def fig_gain_in_out(s, _):
    return in_against_out(s, ["pass@1", "pass@8"], ["gain in pass@1", "gain in pass@8"], "")


def fig_length_in_out(s, _):
    return in_against_out(s, ["mean_length"], ["change of the mean length"], " (tokens)")


def fig_right_wrong(s, _):
    boxes = [("untrained", LOOKS["untrained"][0], length_gaps(s.base[s.inside]))] if s.inside in s.base else []
    for c in s.conditions:
        last = c.rows(s.inside, s.base.get(s.inside))[1]
        boxes.append((c.label, c.look[0], [g for r in last for g in length_gaps(r)]))
    boxes = [b for b in boxes if b[2]]
    if not boxes:
        raise Missing("no problem has both right and wrong answers")
    fig, (ax,) = panels(1)
    fig.set_size_inches(7, 0.36 * len(boxes) + 1.2)
    parts = ax.boxplot([b[2] for b in boxes], orientation="horizontal", tick_labels=[b[0] for b in boxes], widths=0.6,
                       showmeans=True, showfliers=False, patch_artist=True, medianprops={"color": "black"},
                       meanprops={"marker": "D", "markerfacecolor": "white", "markeredgecolor": "black"})
    for box, b in zip(parts["boxes"], boxes):
        box.set(facecolor=b[1], alpha=0.55)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.invert_yaxis()
    ax.set(xlabel=f"right minus wrong, mean length a problem on {s.inside} (tokens)")
    return fig, "Box: quartiles over problems that have both, all seeds; whiskers: 1.5 quartile ranges; diamond: mean"


def fig_reward(s, rewards):
    arms = [c for c in s.conditions if any(m.get("reward") is not None for r in c.runs for m in r.metrics)]
    if not arms:
        raise Missing("no arm recorded a reward")
    fig, axes = panels(len(arms), height=2.3)
    for ax, c in zip(axes, arms):
        r = c.runs[0]
        x, y = np.array([(m["step"], m["reward"]) for m in r.metrics if m.get("reward") is not None], float).T
        groups = rewards.get(c.label) or []
        if len(groups) > 1:   # a step's reward is a mean over N problems: so far it strays by the draw alone
            half = 2 * np.std(groups, ddof=1) / math.sqrt(r.args.get("prompts_per_step") or 8)
            ax.fill_between(x, y.mean() - half, y.mean() + half, color="#CCCCCC", alpha=0.5, linewidth=0)
        ax.plot(x, y, color=c.look[0], linewidth=0.6, alpha=0.6)
        w = min(15, len(y))
        ax.plot(x[w - 1:], np.convolve(y, np.ones(w) / w, "valid"), color=c.look[0], linestyle=c.look[1])
        ax.set_title(f"{c.label}, seed {r.seed}", fontsize=8.5)
        ax.set_xlabel("step")
    return fig, ("Thin: each step; thick: running mean of 15 steps. Grey: mean plus and minus two standard deviations "
                 "of a batch, from the spread of the problems' mean rewards in samples.jsonl: what the draw of the "
                 "problems does alone")


def fig_kl(s, _):
    fig, (ax,) = panels(1)
    fig.set_size_inches(6.4, 4)
    measured = {c.label: by_step(s, c, s.inside, "kl") for c in s.conditions}
    source = f"evaluations on {s.inside} (--eval-kl)"
    if not any(measured.values()):   # then from the arms that have a KL term; opd's is to its teacher, not to the start
        source = "training steps, the KL term's own estimate"
        for c in s.conditions:
            if c.arm != "opd":
                measured[c.label] = metric_by_step(c, "kl")
    for c in s.conditions:
        draw_band(ax, c, measured[c.label])
    if not any(measured.values()):
        raise Missing("no arm measured its KL to the start (--eval-kl)")
    without = [label for label, points in measured.items() if not points]
    ax.set(xlabel="step", ylabel="KL to the start (nats a token)")
    legend(fig, [ax])
    absent = f"; not measured: {', '.join(without)}" if without else ""
    return fig, f"{BAND}. From {source}{absent}"


def fig_slope(s, _):
    rows = []
    for c in s.conditions:
        slopes = [x for x in (slope([(r["step"], scalar(r, "pass@1")) for r in run.evals.get(s.inside, [])])
                              for run in c.runs) if x]
        gain = change(s, c, s.inside, "pass@1")
        if slopes and gain:
            rows.append((c, np.mean([x[0] for x in slopes]), np.mean([x[1] for x in slopes]), gain))
    if not rows:
        raise Missing("a slope needs evaluations at three steps or more")
    fig, axes = panels(2)
    fig.set_size_inches(8, 0.36 * len(rows) + 1.4)
    for i, (c, b, se, gain) in enumerate(rows):
        axes[0].errorbar(b, i, xerr=2 * se, color=c.look[0], marker=c.look[2], markersize=7)
        axes[1].errorbar(gain.mean, i, xerr=gain.floor, color=c.look[0], marker=c.look[2], markersize=7)
    for ax, title in zip(axes, ("slope of pass@1 per 100 steps", "pass@1, last minus untrained")):
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_yticks(range(len(rows)), [r[0].label for r in rows] if ax is axes[0] else [""] * len(rows))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_title(title)
    return fig, ("Left: least squares over evaluations, bar two standard errors of the fit (mean over seeds); right: "
                 "bar the larger of spread and two paired standard errors")


def fig_final_table(s, _):
    table = final_table(s)
    body = [[c[0] if isinstance(c, tuple) else c for c in row] for row in table["rows"]]
    fig, (ax,) = panels(1)
    fig.set_size_inches(1.15 * len(table["head"]) + 1.6, 0.3 * len(body) + 0.9)
    ax.axis("off")
    drawn = ax.table(body, colLabels=["\n".join(h.rsplit(" ", 1)) for h in table["head"]],
                     loc="center", cellLoc="center", colWidths=[2.3, 0.6] + [1.15] * (len(body[0]) - 2))
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    drawn.scale(1 / (2.9 + 1.15 * (len(body[0]) - 2)), 1.15)
    for i, row in enumerate(table["rows"]):
        for j, cell in enumerate(row):
            if isinstance(cell, tuple) and cell[1] is not None:
                drawn[i + 1, j].set_facecolor(shade(cell[1]))
    for j in range(len(body[0])):
        drawn[0, j].set_height(drawn[0, j].get_height() * 2)
    return fig, "Means over seeds; colour: fractional change against untrained (blue up, orange down, full at 25%)"


def shade(x):
    """A fractional change -> colour: blue up, orange down; the lightness carries its size in grey too."""
    part = min(1.0, abs(x) / 0.25)
    end = (0x56, 0xB4, 0xE9) if x > 0 else (0xE6, 0x9F, 0x00)
    return "#" + "".join(f"{round(255 + (e - 255) * part):02x}" for e in end)


#          name                 title                                                function
FIGURES = [("length-accuracy", "Length against pass@1 over training", fig_length_accuracy),
           ("tokens", "Median right length, and tokens per solved problem", fig_tokens),
           ("entropy", "Entropy at evaluations", fig_entropy),
           ("opd", "On-policy distillation step by step", fig_opd),
           ("passk", "pass@k over training, and the gap", fig_passk),
           ("gap-parts", "What closes or widens the gap", fig_gap_parts),
           ("final-passk", "pass@k at the end", fig_final_passk),
           ("distinct", "Distinct final answers", fig_distinct),
           ("gain-in-out", "Gain inside against outside", fig_gain_in_out),
           ("right-wrong", "Length of right against wrong answers", fig_right_wrong),
           ("length-in-out", "Length change inside against outside", fig_length_in_out),
           ("reward", "Training reward and the spread that the batches give", fig_reward),
           ("kl", "KL to the start", fig_kl),
           ("slope", "Slope over checkpoints beside the last number", fig_slope),
           ("final-table", "Final table", fig_final_table)]


def facts(study):
    """What a caption must say: n, problems, seeds."""
    n = "; ".join(f"{x}: {r['limit']} problems x {r['n']} samples" for x, r in study.base.items()
                  if x in (study.inside, study.outside)) or "no step 0"
    seeds = defaultdict(list)
    for c in study.conditions:
        seeds[", ".join(map(str, c.seeds))].append(c.label)
    if len(seeds) == 1:
        return f"{n}. Seeds {next(iter(seeds))} of every arm."
    return f"{n}. " + " ".join(f"Seeds {k}: {', '.join(v)}." for k, v in seeds.items())


def draw_all(study, rewards, out):
    """Writes every figure as PNG and SVG -> [(title, caption, svg bytes)], and sentences on those left out."""
    plt, done, left = plots(), [], []
    for name, title, fn in FIGURES:
        try:
            fig, interval = fn(study, rewards)
        except Missing as e:
            left.append(f"figure {name} left out: {e}")
            continue
        stem = f"{study.name + '-' if study.name else ''}{name}"
        fig.savefig(out / f"{stem}.png", dpi=130, metadata={"Software": None})
        fig.savefig(out / f"{stem}.svg", metadata={"Date": None})
        plt.close(fig)
        done.append((title, f"{interval}. {facts(study)}", (out / f"{stem}.svg").read_bytes(), stem))
    return done, left


# ----------------------------------------------------------------------------------------------------------------------
# Samples: some of every arm's rollouts for the page, and the problems' mean rewards for the reward figure

PAGE_BYTES = 2_200_000   # of samples on the page
#          steps, problems, samples: the first that fits
RATIONS = [(5, 2, 8), (5, 2, 4), (4, 2, 4), (3, 2, 4), (3, 1, 4), (3, 1, 2), (2, 1, 2), (2, 1, 1)]


def read_samples(run, said):
    """One pass over samples.jsonl -> (rows of up to 5 steps and 2 problems a step, mean reward of each group)."""
    steps = sorted({m["step"] for m in run.metrics})
    wanted = {steps[round(i * (len(steps) - 1) / 4)] for i in range(5)} if steps else set()
    rewards, kept, ids, bad, path = defaultdict(list), [], defaultdict(list), 0, run.folder / "samples.jsonl"
    if not path.exists():
        return [], []
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                row = json.loads(line)
                step, problem = row["step"], row["id"]
            except (ValueError, KeyError, TypeError):
                bad += 1
                continue
            if isinstance(row.get("reward"), (int, float)):
                rewards[step, problem].append(row["reward"])
            if step in wanted:
                if problem not in ids[step]:
                    ids[step].append(problem)
                if problem in ids[step][:2]:
                    kept.append(row)
    if bad:
        said.append(f"{path}: {bad} torn or foreign rows left out")
    return kept, [float(np.mean(v)) for v in rewards.values()]


def tokenizer_of(run, said):
    """The tokenizer beside the run's checkpoint, else the start model's; None with a word when there is neither."""
    model = Path(str(run.args.get("model")))
    for folder in (run.folder / "checkpoint", model, ROOT / model):
        if (folder / "tokenizer.json").exists():
            try:
                return common.load_tokenizer(folder)
            except UserError as e:
                said.append(str(e))
    said.append(f"{run.name}: no tokenizer at hand; its samples show the answer's text alone")


def segments(row, tokenizer):
    """-> [[kind, text], ...]: prompt, trained, sampled (no gradient), injected; the kinds come from the mask."""
    trained = "trained" if row.get("trained", row.get("adv", 1) != 0) else "sampled"
    if tokenizer is None or not row.get("ids") or not row.get("mask"):
        return [[trained, row.get("text", "")]]
    kinds = ["prompt" if i < row.get("prompt_length", 0) else trained if m else "injected"
             for i, m in enumerate(row["mask"])]
    out, start = [], 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            out.append([kinds[start], tokenizer.decode(row["ids"][start:i])])
            start = i
    return out


SHOWN_APART = {"step", "id", "sample", "ids", "mask", "text", "prompt_length", "finish", "reward", "logp", "trained"}


def page_samples(studies, said):
    """-> (rollouts for the page, the rule in words, {study: {label: mean rewards of groups}})."""
    found, rewards, tokenizers = [], {}, {}
    for s in studies:
        rewards[s.name] = {}
        for c in s.conditions:
            rows, groups = read_samples(c.runs[0], said)
            rewards[s.name][c.label] = groups
            key = s.model.get("sha256")
            if rows and key not in tokenizers:
                tokenizers[key] = tokenizer_of(c.runs[0], said)
            found.append((s, c, rows, tokenizers.get(key)))
    for steps, problems, samples in RATIONS:
        out = []
        for s, c, rows, tokenizer in found:
            have = sorted({r["step"] for r in rows})
            take = {have[round(i * (len(have) - 1) / max(1, steps - 1))] for i in range(steps)} if have else set()
            for step in sorted(take):
                ids = list(dict.fromkeys(r["id"] for r in rows if r["step"] == step))[:problems]
                for r in [r for r in rows if r["step"] == step and r["id"] in ids and r.get("sample", 0) < samples]:
                    parts = {k: v for k, v in r.items() if k not in SHOWN_APART}
                    out.append({"arm": f"{s.name} {c.label}".strip(), "seed": c.runs[0].seed, "step": step,
                                "id": r["id"], "sample": r.get("sample", 0), "reward": r.get("reward"),
                                "right": bool(r.get("right")), "lenient": bool(r.get("lenient")), "parts": parts,
                                "finish": r.get("finish", ""), "text": segments(r, tokenizer)})
        if len(json.dumps(out)) <= PAGE_BYTES:
            break
    else:
        while len(json.dumps(out)) > PAGE_BYTES:
            out = out[::2]
    rule = (f"{len(out)} rollouts of training: of each arm's lowest seed up to {steps} steps evenly spaced from first "
            f"to last, at each the first {problems} problems of the batch and their first {samples} answers. All "
            f"rollouts are in samples.jsonl of the run folders.")
    return out, rule, rewards


# ----------------------------------------------------------------------------------------------------------------------
# The page and the Markdown

def as_markdown(table):
    def line(cells):
        return "| " + " | ".join(str(c[0] if isinstance(c, tuple) else c).replace("|", "\\|").replace("\n", " ")
                                 for c in cells) + " |"
    return "\n".join([f"## {table['title']}", "", line(table["head"]), "|" + "---|" * len(table["head"]),
                      *[line(r) for r in table["rows"]], "", table["note"], ""])


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>nanopost report</title>
<style>
:root { color-scheme: light } * { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 1180px;
       padding: 1rem 1.2rem 4rem }
h1 { font-size: 1.5rem; margin: .3rem 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid #ddd }
nav a { margin-right: .9rem } .note, figcaption { color: #555; font-size: .85rem; max-width: 62rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .82rem; margin: .4rem 0 }
th, td { padding: .22rem .5rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top }
th { background: #f4f4f4 } td.n { font-variant-numeric: tabular-nums; white-space: nowrap }
figure { margin: 1.2rem 0 } figure img { max-width: 100%; height: auto } .said li { margin-bottom: .5rem }
.filters { position: sticky; top: 0; background: #fff; padding: .5rem 0; border-bottom: 1px solid #ddd; z-index: 1;
           display: flex; flex-wrap: wrap; gap: .4rem .9rem; font-size: .85rem }
.card { border: 1px solid #ddd; border-left: 5px solid #D55E00; border-radius: 4px; margin: .6rem 0;
        padding: .5rem .7rem }
.card.ok { border-left-color: #0072B2 } .card header { font-size: .82rem; color: #333 }
.card pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0 0;
            font: .82rem/1.45 ui-monospace, monospace }
.tag { border: 1px solid #999; border-radius: 3px; padding: 0 .3rem; margin-left: .4rem }
.tag.cut { background: #D55E00; color: #fff; border-color: #D55E00 }
.prompt { color: #777 } .trained { background: #d8ecf8; border-bottom: 2px solid #0072B2 }
.sampled { background: #f1f1f1 } .injected { background: #fdeec4; border: 1px dashed #8C6D00 }
</style></head><body>
<h1>nanopost report</h1>
<p class="note">{{ made }}</p>
<nav>{% for s in studies %}<a href="#s{{ loop.index }}">{{ s.title }}</a>{% endfor %}<a href="#samples">Samples</a>
<a href="#labbook">Lab book</a><a href="#notes">Notes</a></nav>
{% macro show(t) %}<div class="wide"><table>
<thead><tr>{% for h in t.head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in t.rows %}<tr>{% for c in row %}{% if c is string %}
<td{% if c|length < 44 %} class="n"{% endif %}>{{ c }}</td>{% else %}
<td class="n"{% if c[1] is not none %} style="background:{{ shade(c[1]) }}"
title="{{ '%+.1f%%' % (100 * c[1]) }}"{% endif %}>{{ c[0] }}</td>{% endif %}{% endfor %}</tr>{% endfor %}
</tbody></table></div><p class="note">{{ t.note }}</p>{% endmacro %}
{% for s in studies %}<section id="s{{ loop.index }}"><h2>{{ s.title }}</h2><p class="note">{{ s.about }}</p>
<ul class="said">{% for x in s.sentences %}
<li><strong>{{ x.split(',', 1)[0] }}</strong>,{{ x.split(',', 1)[1] }}</li>{% endfor %}</ul>
{% for t in s.tables %}<h2>{{ t.title }}</h2>{% if t.folded %}
<details><summary>{{ t.rows|length }} rows</summary>{{ show(t) }}</details>{% else %}{{ show(t) }}{% endif %}
{% endfor %}
<h2>Figures</h2>{% for title, caption, svg, stem in s.figures %}<figure id="{{ stem }}"><strong>{{ title }}</strong><br>
<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ b64(svg) }}"><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}</section>{% endfor %}
<h2 id="samples">Samples</h2><p class="note">{{ rule }} <span class="trained">trained tokens</span>
<span class="sampled">sampled, no gradient (advantage 0 or not picked)</span> <span class="injected">injected by the
environment</span> <span class="prompt">prompt</span> <span class="tag cut">cut</span> at the token limit.</p>
<div class="filters" id="filters"></div><p class="note" id="count"></p><div id="cards"></div>
<p><button id="more">more</button></p>
<h2 id="labbook">Lab book</h2>{% for x in labbook %}<p>{{ x }}</p>{% endfor %}
{% if ledger.rows %}{{ show(ledger) }}{% endif %}
<h2 id="notes">Notes</h2><ul>{% for x in notes %}<li>{{ x }}</li>{% endfor %}</ul>
<script type="application/json" id="data">{{ data }}</script>
<script>
const all = JSON.parse(document.getElementById('data').textContent), box = document.getElementById('filters');
const distinct = k => [...new Set(all.map(r => r[k]))];
const pick = {}, make = (tag, text, cls) => { const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };
function select(name, values) {
  const label = make('label', name + ' '), s = make('select');
  for (const v of ['all', ...values]) { const o = make('option', String(v)); o.value = String(v); s.append(o); }
  s.onchange = () => { shown = 40; draw(); }; pick[name] = s; label.append(s); box.append(label);
}
function bound(name) {
  const label = make('label', name + ' '), i = make('input'); i.type = 'number'; i.step = '0.05'; i.style.width = '5em';
  i.oninput = () => { shown = 40; draw(); }; pick[name] = i; label.append(i); box.append(label);
}
let shown = 40;
select('arm', distinct('arm')); select('step', distinct('step').sort((a, b) => a - b));
select('problem', distinct('id'));
select('answer', ['right', 'wrong', 'right number, wrong form', 'cut']); bound('reward from'); bound('reward to');
const is = { 'right': r => r.right, 'wrong': r => !r.right, 'right number, wrong form': r => r.lenient && !r.right,
  'cut': r => r.finish === 'length' };
function keep(r) {
  const v = n => pick[n].value, low = v('reward from'), high = v('reward to');
  return (v('arm') === 'all' || r.arm === v('arm')) && (v('step') === 'all' || String(r.step) === v('step')) &&
    (v('problem') === 'all' || String(r.id) === v('problem')) && (v('answer') === 'all' || is[v('answer')](r)) &&
    (low === '' || r.reward !== null && r.reward >= +low) && (high === '' || r.reward !== null && r.reward <= +high);
}
const short = x => typeof x === 'number' ? +x.toFixed(4) : typeof x === 'object' && x !== null ? JSON.stringify(x) : x;
function draw() {
  const list = all.filter(keep), cards = document.getElementById('cards'); cards.replaceChildren();
  document.getElementById('count').textContent = list.length + ' of ' + all.length + ' rollouts';
  for (const r of list.slice(0, shown)) {
    const card = make('div', undefined, r.right ? 'card ok' : 'card');
    const head = make('header', r.arm + ', seed ' + r.seed + ', step ' + r.step + ', problem ' + r.id +
      ', answer ' + r.sample);
    head.append(make('span', r.right ? 'right' : r.lenient ? 'right number, wrong form' : 'wrong', 'tag'));
    if (r.finish === 'length') head.append(make('span', 'cut', 'tag cut'));
    else head.append(make('span', 'ends by ' + r.finish, 'tag'));
    head.append(make('div', 'reward ' + (r.reward === null ? '-' : short(r.reward)) + '; ' +
      Object.entries(r.parts).map(([k, v]) => k + ' ' + short(v)).join(', ')));
    const pre = make('pre'); for (const [kind, text] of r.text) pre.append(make('span', text, kind));
    card.append(head, pre); cards.append(card);
  }
  document.getElementById('more').hidden = list.length <= shown;
}
document.getElementById('more').onclick = () => { shown += 40; draw(); };
draw();
</script></body></html>
"""


def write_page(path, **fields):
    import jinja2
    import markupsafe
    data = json.dumps(fields.pop("samples"), ensure_ascii=False).replace("<", "\\u003c")   # no tag can end the script
    env = jinja2.Environment(autoescape=True, trim_blocks=True)
    page = env.from_string(PAGE).render(data=markupsafe.Markup(data), shade=shade,
                                        b64=lambda x: base64.b64encode(x).decode(), **fields)
    common.write_text(path, page)


def describe(study):
    """Start model, device, precision, versions and dates of a study."""
    runs = [r for c in study.conditions for r in c.runs]

    def each(values):
        return ", ".join(sorted({str(v) for v in values if v})) or "unknown"
    when = [r.record.get("time", "") for r in sorted(runs, key=lambda r: moment(r.record))]
    adapter = f" with the adapter {study.model['adapter'].get('name')}" if study.model.get("adapter") else ""
    text = (f"Start: {study.model.get('name')}{adapter} ({str(study.model.get('sha256'))[:12]}). Devices: "
            f"{each(r.record.get('device') for r in runs)}; precision {each(r.products for r in runs)}; presets "
            f"{each(r.args.get('preset') or 'none' for r in runs)}; "
            f"torch {each((r.record.get('versions') or {}).get('torch') for r in runs)}; commits "
            f"{each((r.record.get('git') or {}).get('commit') for r in runs)}; {when[0][:16]} to {when[-1][:16]}. "
            f"Inside is {study.inside}, outside {study.outside or 'not evaluated'}.") if runs else "No finished run."
    for e in study.noise:
        b = study.base[e["split"]]
        text += (f" A second evaluation of the untrained model on {e['split']} (seed {e['seed']}): pass@1 "
                 f"{e['pass_at']['1']:.3f} against {b['pass_at']['1']:.3f}.")
    if any(r["n"] < 8 for r in study.base.values()):
        text += (" With one sample a problem on 60 problems a true gain of .10 is found in under half of the studies; "
                 "take n = 32.")
    return text


def report(args):
    said = []
    paths = args.runs or [ROOT / "runs"]
    runs, evals = load_all(paths, said)
    studies = [s for s in make_studies(runs, evals, said) if s.conditions]
    for line in said:
        print(line)
    if not studies:
        raise UserError(f"nothing to report: {len(runs)} run folders could be read under "
                        f"{' '.join(map(str, paths))}, none with a finished evaluation before and after "
                        f"(--runs names folders; the lines above say what was skipped)")
    records, problems = common.read_labbook(args.labbook) if Path(args.labbook).exists() else ([], [
        f"{args.labbook}: no such lab book; margins and predictions are unknown"])
    out = Path(args.output_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--output-dir {out}: cannot be made ({e.strerror})") from e
    before = len(said)
    samples, rule, rewards = page_samples(studies, said)
    shown, verdict_rows, text = [], [], []
    for s in studies:
        verdicts = {(c.label, x): v for c in s.conditions for x in s.splits if (v := judge_condition(s, c, x))}
        for (_, x), v in verdicts.items():
            v["split"] = x
        margins = {(c.label, x): margin_for(records, x, c.runs)
                   for c in s.conditions if not c.control for x in s.splits}
        for c in s.conditions:
            for x in s.splits:
                if (v := verdicts.get((c.label, x))) and v["code"] in ("effect", "format") and not c.control:
                    v["control"] = control_note(s, c, v, verdicts)
        tables = [final_table(s), runs_table(s, records), verdict_table(s, verdicts, margins), findings_table(s),
                  control_table(s), comparison_table(s), budget_table(s, records)]
        tables[2]["note"] += "".join(f" By the {x}." for x in dict.fromkeys(m[1] for m in margins.values() if m[0]))
        if problems and records:
            tables[2]["note"] += " The lab book's chain is broken (see Lab book): a margin may have been edited."
        said += [f"table {t['title']} left out: no such runs" for t in tables if not t["rows"]]
        tables = [t for t in tables if t["rows"]]
        figures, left = draw_all(s, rewards[s.name], out)
        said += left
        title = f"{s.task}{' (' + s.name + ')' if s.name else ''}"
        shown.append({"title": title, "about": describe(s), "tables": tables, "figures": figures,
                      "sentences": sentences(s, verdicts, margins, records)})
        text += [f"# {title}", "", shown[-1]["about"], "", *[f"- {x}" for x in shown[-1]["sentences"]], "",
                 *map(as_markdown, tables)]
        verdict_rows += [{"study": title, "arm": c, "split": x, **v,
                          "in_words": "refused" if v["code"] == "refused" else in_words(v, x)}
                         for (c, x), v in verdicts.items()]
    shown_runs = {id(r) for s in studies for r in [*s.lost, *(r for c in s.conditions for r in c.runs)]}
    if outside := [r.name for r in runs if not r.evals and id(r) not in shown_runs]:
        said.append(f"runs without evaluations, in no figure: {', '.join(outside)}")
    for line in said[before:]:
        print(line)
    rows, hits = ledger(records)
    book = [*problems] or [f"{args.labbook}: {len(records)} records, the chain is whole"]
    book += about_starts(records)
    book += [hits] if rows else []
    predictions = {"title": "Predictions", "rows": rows,
                   "head": ["run", "written down", "prediction", "got", "outcome", "noise", "lesson"],
                   "note": "All of the lab book, older studies too. Hit: as predicted. Within noise: off by no more "
                           "than the noise named. Open: no end, or no number."}
    if rows:
        text.append(as_markdown(predictions))
    made = (f"{time.strftime('%Y-%m-%d %H:%M')} by report.py, commit {common.git_state()['commit']}, from "
            f"{sum(len(c.runs) for s in studies for c in s.conditions)} runs")
    common.write_text(out / "tables.md", "\n".join([*text, "# Lab book", "", *book, "", "# Notes", "",
                                                    *[f"- {x}" for x in said], ""]))
    common.write_text(out / "verdicts.json", "".join(json.dumps(common.finite(v)) + "\n" for v in verdict_rows))
    write_page(out / "report.html", studies=shown, samples=common.finite(samples), rule=rule, labbook=book,
               ledger=predictions, notes=said or ["nothing was left out"], made=made)
    for s in shown:
        for x in s["sentences"]:
            print(x)
    size = (out / "report.html").stat().st_size / 1e6
    print(f"{sum(len(s['figures']) for s in shown)} figures, {sum(len(s['tables']) for s in shown)} tables, "
          f"{len(samples)} rollouts: {out / 'report.html'} ({size:.1f} MB), {out / 'tables.md'}, "
          f"{out / 'verdicts.json'}")


if __name__ == "__main__":
    common.fail_in_one_line()
    args = get_args()
    if args.register_margin:
        register_margin(args.labbook, args.register_margin)
    elif args.lesson:
        add_lesson(args.labbook, args.lesson)
    elif args.check:
        raise SystemExit(check_labbook(args.labbook))
    else:
        report(args)
