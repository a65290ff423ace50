"""
The tasks: where their problems lie, how an answer is graded, and the harness that plays them with an engine.

A task is one class and one row of TASKS. `load(split)` gives checked rows, `grade(text, row)` reads an answer twice:
strictly (the marked answer, `#### N`), which is the reward and the headline score, and leniently (the last number).
A row's grade never depends on other rows, and a truncated answer is wrong in both readings.
"""
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

import common
from common import ROOT, UserError


class NumberTask:
    """Problems whose answer is one number, marked by `#### N`."""
    extractor = "number-1"   # in every evaluation's record; two readings are never compared under one name
    train, splits = "train", ()

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


TASKS = {t.name: t for t in (Arithmetic, GSM8K)}


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
    `sampling` goes to Engine.generate (max_new, temperature, seed, step, stop, greedy, entropy).
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
