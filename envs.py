"""
The tasks: where their problems lie, how an answer is graded, and the harness that plays them with an engine.

A task is one class and one row of TASKS. `load(split)` gives checked rows, `grade(text, row)` reads an answer twice:
strictly (the marked answer, `#### N`), which is the reward and the headline score, and leniently (the last number).
A row's grade never depends on other rows, and a truncated answer is wrong in both readings.
"""
import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

import common
from common import ROOT, RunError, UserError


class NumberTask:
    """
    Problems whose answer is one number, marked by `#### N`; also the base of every other task. A subclass has `name`,
    `splits` (its held-out files, the first one of the family that is trained on) and, with a grade of its own, an
    `extractor` of its own.
    """
    extractor = "number-1"   # in every evaluation's record; two readings are never compared under one name
    train = "train"

    def __init__(self, folder=None):
        self.folder = Path(folder) if folder else ROOT / "data" / self.name

    def path(self, split):
        path = self.folder / f"{split}.jsonl"
        if not path.exists():
            have = ", ".join(sorted(p.stem for p in self.folder.glob("*.jsonl"))) or "nothing"
            raise UserError(f"{path}: no such file ({self.folder} holds {have}; python data/{self.name}/prepare.py "
                            f"makes it)")
        return path

    def load(self, split, limit=None):
        """-> rows of a split. A row is refused with file, line and reason when its answer is no number."""
        return load_rows(self.path(split), self, limit)

    def check(self, row):
        if common.read_number(str(row["answer"]), whole=True) is None:
            raise ValueError(f"`answer` {row['answer']!r} is not a number")

    def grade(self, text, row):
        """-> {"right", "lenient": bool, "answer": what the strict reading found, as text, or None}."""
        want = common.read_number(str(row["answer"]))
        found = common.strict_answer(text)
        return {"right": common.same_number(found, want),
                "lenient": common.same_number(common.lenient_answer(text), want),
                "answer": None if found is None else str(found)}


class Arithmetic(NumberTask):
    """Generated word problems; the files are made on first use, the same bytes for a seed."""
    name, splits = "arithmetic", ("heldout-same", "heldout-different")

    def path(self, split):
        if not (self.folder / "train.jsonl").exists() and self.folder == ROOT / "data" / self.name:
            spec = importlib.util.spec_from_file_location("prepare_arithmetic", self.folder / "prepare.py")
            prepare = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(prepare)
            prepare.make_tasks(self.folder)
        return super().path(split)


class GSM8K(NumberTask):
    """Grade-school word problems (arXiv 2110.14168)."""
    name, splits = "gsm8k", ("test",)


# ----------------------------------------------------------------------------------------------------------------------
# Competition mathematics: the answers are LaTeX, compared as values by math-verify in a process of its own

def verify_answers():
    """
    The whole program of that process: one line [gold, text, marked] in, one line 1 or 0 out. LaTeX of a model may keep
    sympy busy for ever inside one C call (9^{9^{9^9}}), so the kernel ends the process when an answer takes too long.
    """
    import functools
    import json
    import logging
    import resource
    import signal
    import sys

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr   # whatever a library prints, only verdicts leave by the pipe
    # its list of units is not used: it holds "t", "h" and "ab", so that 5t would equal 5
    latex = LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    @functools.lru_cache(maxsize=4096)
    def value(text):
        return parse(f"\\boxed{{{text}}}", [latex], "no_fallback", "first_match", parsing_timeout=None)

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)      # the default is the end, with no help from Python
    print("ready", file=replies, flush=True)
    for line in sys.stdin:                         # the parent's death ends the loop
        gold, text, marked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, 2)    # seconds of CPU, so that a busy machine changes no verdict
        signal.setitimer(signal.ITIMER_REAL, 20)
        found = value(text) if marked else parse(text, [latex, ExprExtractionConfig()], "no_fallback",
                                                 parsing_timeout=None)
        right = verify(value(gold), found, float_rounding=8, allow_set_relation_comp=True, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(int(right), file=replies, flush=True)


class Verifier:
    """Asks that process; starts it at the first question and again after it was ended. `stopped`: answers that did."""
    program = inspect.getsource(verify_answers) + "verify_answers()\n"   # no torch in it: it starts within a second

    def __init__(self):
        self.child, self.stopped = None, 0

    def start(self):
        if not importlib.util.find_spec("math_verify"):
            raise UserError("--task math500 needs the package math-verify (pip install math-verify)")
        # a session of its own: Ctrl-C is for the script, which still wants to grade what it has sampled
        child = subprocess.Popen([sys.executable, "-P", "-c", self.program], text=True, stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                                 env={**os.environ, "PYTHONHASHSEED": "0"})
        if child.stdout.readline() != "ready\n":
            raise RunError(f"the grader of math500 did not start (exit code {child.wait()}); "
                           f"python -c 'import math_verify' shows why")
        return child

    @functools.lru_cache(maxsize=1 << 16)   # noqa: B019  (there is one Verifier, and samples repeat their answers)
    def equal(self, gold, text, marked):
        if self.child is None or self.child.poll() is not None:
            self.child = self.start()
        child, self.child = self.child, None   # an interrupt in here leaves no late reply to the next question
        child.stdin.write(json.dumps([gold, text, marked]) + "\n")
        child.stdin.flush()
        reply = child.stdout.readline()
        if reply:
            self.child = child
        else:
            self.stopped += 1
            print(f"math500: grading {text[:60]!r} was stopped (exit code {child.wait()}); it counts as wrong, "
                  f"{self.stopped} so far", file=sys.stderr, flush=True)
        return reply == "1\n"


WORDS = re.compile(r"\\(?:text|mbox|textbf|mathrm)\s*\{[^{}]+\}|[A-Za-z][A-Za-z ]{3,}")
UNIT = re.compile(r"(?:(?<=\S)\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}"                        # 15\mbox{ cm}^2
                  r"|(?<=\d)\s*(?:(?:cm|mm|km|ft|kg)|\s[A-Za-z][A-Za-z ]{3,}))(\^\{?\d\}?)?$")   # 3 cm  7 square feet
BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?$")                                                   # 52_8


def last_box(text):
    """What the last \\boxed{...} holds, or None."""
    rest, depth = text.rpartition("\\boxed{")[2] if "\\boxed{" in text else "", 1
    for i, c in enumerate(rest):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return rest[:i]


class MathTask(NumberTask):
    """MATH-500 (arXiv 2103.03874, the test problems of 2305.20050): numbers, roots, sets, intervals, matrices, words"""
    name, extractor, splits = "math500", "math-verify-1", ("test",)
    verifier = Verifier()

    def path(self, split):
        if split == self.train and not (self.folder / f"{split}.jsonl").exists():
            raise UserError(f"--task math500: {self.folder} has no {split}.jsonl, it is a test and nothing to train on "
                            f"(--tasks-dir takes a folder with {split}.jsonl and test.jsonl)")
        return super().path(split)

    def check(self, row):
        if not self.equal(str(row["answer"]), str(row["answer"])):   # a key that no answer could equal
            raise ValueError(f"`answer` {row['answer']!r} is no value that math-verify can read")

    def clean(self, text):
        """An answer without bold, math, money and degree signs and without its unit; x \\in [1, 2] is [1, 2]."""
        text = text.strip().lstrip("*`_=: ").rstrip("*`_. ")
        text = re.sub(r"(?<!\\)\\[()\[\]]|\\?[$€£]|°|\^\{?\\circ\}?|\\!", "", last_box(text) or text)
        return re.sub(r"^[A-Za-z]\s*\\in\b\s*", "", UNIT.sub("", text.strip().rstrip(".")))

    def equal(self, gold, text):
        """Whether two answers are one value: words by their letters, numbers exactly, the rest by math-verify."""
        gold, text = self.clean(gold), self.clean(text)
        if WORDS.fullmatch(gold):
            a, b = (re.sub(r"\\[a-z]+|[\W_]", "", x.lower()) for x in (gold, text))
            return a == b != ""
        base, want = BASE.search(text), BASE.search(gold)
        if not text or (base and want and base[1] != want[1]):   # math-verify drops the base
            return False
        gold, text = BASE.sub("", gold), BASE.sub("", text)
        a, b = common.read_number(gold, whole=True), common.read_number(text, whole=True)
        if a is not None and b is not None and "%" not in gold + text:
            return abs(a - b) <= Fraction(1, 10 ** 6) * min(1, abs(a))   # 1/3 is 0.333333, 0.0001 is not 0.0001001
        return self.verifier.equal(gold, text, True)

    def grade(self, text, row):
        """As NumberTask's. The lenient reading is the mark, else the last box, else what math-verify finds."""
        gold = str(row["answer"])
        found = self.clean(text.rpartition("####")[2].split("\n")[0]) if "####" in text else ""
        if found and len(found) <= 500:   # no key is near as long
            right = self.equal(gold, found)
            return {"right": right, "lenient": right, "answer": found}
        box = last_box(text)
        lenient = self.equal(gold, box[:500]) if box else self.verifier.equal(self.clean(gold), text[-2000:], False)
        return {"right": False, "lenient": lenient, "answer": None}


TASKS = {t.name: t for t in (Arithmetic, GSM8K, MathTask)}


def load_rows(path, task, limit=None):
    def check(row):
        common.check_task_row(row)
        task.check(row)
    rows = common.read_rows(path, check, limit)
    seen = set()
    for row in rows:
        if row["id"] in seen:   # the id carries the random numbers and the reward: it must be one problem's
            raise UserError(f"{path}: the id {row['id']!r} stands on two rows")
        seen.add(row["id"])
    return rows


def text_key(row):
    """
    What two problems are compared by: the prompt's text in lower case without what is not seen (format characters) and
    without the instruction for the answer's form. Letters, digits and the signs of arithmetic stay (a hyphen between
    letters is none); all else is one space.
    """
    text = unicodedata.normalize("NFKC", " ".join(m["content"] for m in row["prompt"])).lower()
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    text = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])", " ", re.sub(r"[−–]", "-", text))
    text = re.sub(r"\s*([+*/^=<>-])\s*", r"\1", re.sub(r"[^\w+*/^=<>-]+|_", " ", text)).strip()
    return text.removesuffix("end with and the answer").removeprefix("end with and the answer").strip()


def check_apart(rows, path, task):
    """UserError when one of the rows (of the file `path`) is a problem of the task's held-out files too."""
    held_out = dict.fromkeys([*task.splits, *sorted(p.stem for p in task.folder.glob("heldout-*.jsonl"))])
    for split in held_out:
        seen = {text_key(row) for row in task.load(split)}
        both = [row["id"] for row in rows if text_key(row) in seen]
        if both:
            raise UserError(f"{path}: {len(both)} of {len(rows)} problems stand in {task.path(split)} too, {both[0]!r} "
                            f"for one; drop them, what is evaluated must not be trained on")


def load_train(task):
    """The rows of the task's training file; UserError when it shares problems with the task's held-out files."""
    rows = task.load(task.train)
    check_apart(rows, task.path(task.train), task)
    return rows


def load_pool(path, task, tokenizer, model_folder, any_pool=False, adapter=None):
    """
    The rows of a pool that eval_passk.py --pool-out has screened. UserError when it was screened for another task, with
    another chat template, with other weights than those in model_folder (and in the folder of an adapter) or when it is
    not the file that was written (any_pool lets all of it pass), and when it shares problems with the task's held-out
    files.
    """
    rows = load_rows(path, task)
    if not any_pool:
        mend = "--any-pool takes it all the same"
        try:
            meta = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
            want, screened_with = meta["sha256"], meta["model"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"--pool {path}: no {path}.meta.json that says how it was screened ({type(e).__name__}); "
                            f"{mend}") from e
        found, model = common.sha256_file(path), common.sha256_model(model_folder, adapter)
        if found != want:
            raise UserError(f"--pool {path}: its hash is {found[:12]} and not {want[:12]} as in its meta.json: it was "
                            f"edited after the screening; {mend}")
        if screened_with["sha256"] != model:
            raise UserError(f"--pool {path}: screened with {screened_with['name']} (hash "
                            f"{screened_with['sha256'][:12]}), the model here is {model_folder} ({model[:12]}), for "
                            f"which other problems are too easy or too hard; {mend}")
        for what, was, now in (("task", meta.get("task"), task.name), ("way to read answers", meta.get("extractor"),
                                                                       task.extractor),
                               ("chat template", meta.get("template_sha256"), common.template_sha256(tokenizer))):
            if was not in (None, now):
                raise UserError(f"--pool {path}: screened with another {what} ({str(was)[:12]}, here {now[:12]}); "
                                f"{mend}")
    check_apart(rows, path, task)
    return rows


def get_task(name, folder=None):
    """A name of TASKS -> the task, reading from `folder` (default data/NAME)."""
    if name not in TASKS:
        raise UserError(f"--task {name}: unknown; there is {', '.join(TASKS)}")
    return TASKS[name](folder)


# ----------------------------------------------------------------------------------------------------------------------
# The harness

@dataclass
class Played:
    """Rollouts of N problems, n samples each, with what became of them. Row b belongs to problem b // n."""
    rollout: object            # engine.Rollout: ids, mask, logp, ...
    texts: list                # (B,) decoded answers
    grades: list               # (B,) of task.grade; all False where truncated
    right: torch.Tensor        # (N, n) bool, strict
    lenient: torch.Tensor      # (N, n) bool
    length: torch.Tensor       # (N, n) sampled tokens, the stop token too
    truncated: torch.Tensor    # (N, n) bool


def play(engine, tokenizer, task, rows, n, **sampling):
    """
    n samples of each problem: prompts through the one chat template, generation, decoding, grading.
    `sampling` goes to Engine.generate (max_new, temperature, seed, step, stop, greedy, entropy, and on_stop, which may
    inject tokens).
    """
    prompts = [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]
    numbers = [common.prompt_number(row["id"]) for row in rows]
    r = engine.generate(prompts, n, prompt_ids=numbers, **sampling)
    texts, grades = [], []
    for b in range(len(rows) * n):
        sampled = r.ids[b, :r.length[b]][r.mask[b, :r.length[b]]]
        texts.append(tokenizer.decode(sampled, skip_special_tokens=True))
        grades.append(task.grade(texts[-1], rows[b // n]) if r.finish[b] != "length" else
                      {"right": False, "lenient": False, "answer": None})
    shape = (len(rows), n)
    return Played(r, texts, grades, torch.tensor([g["right"] for g in grades]).view(shape),
                  torch.tensor([g["lenient"] for g in grades]).view(shape), r.mask.sum(1).view(shape),
                  torch.tensor([f == "length" for f in r.finish]).view(shape))
