"""
The one test command.

    python test_smoke.py              everything that is quick: this file and tests/, under 5 minutes on two cores
    python test_smoke.py --slow       the long tests alone
    python test_smoke.py -k resume    names to pick, as in pytest; also files: python test_smoke.py tests/test_model.py

Two pytest processes take files from one list, so that both cores are busy; the last line counts for both. Says which
device it ran on, and lists the skipped tests by reason: a reason that is not among ALLOWED_SKIPS fails the run. With a
CUDA GPU one process more runs tests/*_gpu.py on it; the others do not see it, since exact equality of two runs, and a
fork of a process that has torch loaded, are a CPU's. The tests in this file are the end-to-end ones: every script and
arm for two steps, wrong commands, and the rules of the house.
"""
import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from _pytest._io import TerminalWriter

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
torch.set_num_threads(1)

SCRIPTS = [name for name in ("pretrain", "train_sft", "train_grpo", "train_rft", "train_opd", "eval_passk", "report",
                             "bench") if (ROOT / f"{name}.py").exists()]
TRAINERS = [name for name in SCRIPTS if name.startswith(("train_", "pretrain"))]
ALLOWED_SKIPS = ("needs CUDA", "needs MPS", "needs ../shared/data", "needs package ", "needs root", "needs Linux",
                 "needs namespaces", "needs Landlock", "needs two GPUs")
SPLIT = ("test_smoke.py", "test_scripts.py", "test_grpo.py")   # their fixtures are cheap enough to be made twice


# ----------------------------------------------------------------------------------------------------------------------
# The runner

class Explainer:
    """What pytest asks for a writer (it does so by this name) when it explains a comparison that failed."""
    _tw = TerminalWriter()


class Worker:
    """The plugin of one of the pytest processes: runs the tests that it claims, and writes down what became of them."""

    def __init__(self, folder, number, device=""):
        self.device = device   # "gpu" or "cpu" where there is a CUDA GPU
        self.folder, self.number, self.skips, self.failures, self.tests = Path(folder), number, [], [], []
        self.terminal = os.fdopen(os.dup(1), "w")   # pytest captures what is printed

    def pytest_configure(self, config):
        config.pluginmanager.register(Explainer(), "terminalreporter")

    def say(self, text):
        self.terminal.write(text)
        self.terminal.flush()

    def count(self, word, report):
        self.tests.append([report.nodeid, word, getattr(report, "duration", 0.0)])
        if word == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips.append([reason.removeprefix("Skipped: "), report.nodeid])
        if word in ("failed", "error"):
            self.failures.append([word.upper(), report.nodeid])
            self.say(f"\n{'_' * 20} {report.nodeid} ({report.when}) {'_' * 20}\n{report.longreprtext}\n"
                     + "".join(f"--- {name}\n{text}\n" for name, text in report.sections))

    def pytest_collectreport(self, report):
        if self.number == 0 and report.failed:   # every process collects all files: one of them speaks of it
            report.when = "collection"
            self.count("error", report)
        elif self.number == 0 and report.skipped:
            self.count("skipped", report)

    def pytest_deselected(self, items):
        if self.number == 0:
            self.tests += [[item.nodeid, "deselected", 0.0] for item in items]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            if hasattr(report, "wasxfail"):
                outcome = "xfailed" if report.skipped else "xpassed"
            self.count(outcome, report)
            self.say({"passed": ".", "skipped": "s"}.get(outcome, ""))
        else:   # the time of fixtures counts for the file
            self.tests.append([report.nodeid, "", report.duration])

    def claimed(self, items):
        """The tests of this process: whole files, or test functions of the files in SPLIT, whoever comes first."""
        groups = {}
        if self.device:   # with a GPU: its tests belong to the one process that sees it
            items = [item for item in items if item.path.stem.endswith("_gpu") == (self.device == "gpu")]
        for item in items:
            split = item.path.name in SPLIT
            groups.setdefault((item.path.name, item.originalname if split else ""), []).append(item)
        size = Counter(item.path.name for item in items)
        # whole files first and the longest of them, so that the processes end together
        for (file, part), group in sorted(groups.items(), key=lambda g: (g[0][1] != "", -size[g[0][0]])):
            try:
                os.close(os.open(self.folder / f"{file}-{part}.claimed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            yield from group

    def pytest_runtestloop(self, session):
        items = self.claimed(session.items)
        item = next(items, None)
        while item is not None:
            following = next(items, None)   # pytest keeps the fixtures that this one shares
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def pytest_sessionfinish(self, session, exitstatus):
        (self.folder / f"{self.number}.json").write_text(json.dumps(
            {"skips": self.skips, "failures": self.failures, "tests": self.tests}))


def words(counts):
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error")
    plural = {k: k for k in order} | {"error": "errors" if counts["error"] != 1 else "error"}
    return ", ".join(f"{counts[k]} {plural[k]}" for k in order if counts[k]) or "no tests ran"


def describe_device():
    if torch.cuda.is_available():
        return f"CUDA, {torch.cuda.get_device_name(0)}"
    if torch.backends.mps.is_available():
        return "MPS"
    return f"CPU, {platform.machine()}, {os.cpu_count()} cores"


def get_args(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("files", nargs="*", default=["test_smoke.py", "tests"], help="test files (default: all)")
    p.add_argument("--slow", action="store_true", help="the long tests alone (default: the others alone)")
    p.add_argument("-k", default="", metavar="EXPR", help="pytest's -k: run what matches by name")
    p.add_argument("--workers", type=int, default=min(2, os.cpu_count()), help="pytest processes side by side")
    p.add_argument("--worker", nargs=3, metavar=("FOLDER", "NUMBER", "DEVICE"), help=argparse.SUPPRESS)
    return p.parse_args(argv)


def main():
    args = get_args()
    os.chdir(ROOT)
    if args.worker:
        folder, number, device = args.worker
        return pytest.main(["-p", "no:terminal", "-p", "no:cacheprovider", "-m", "slow" if args.slow else "not slow",
                            "-k", args.k, *args.files], plugins=[Worker(folder, int(number), device)])
    print(f"device: {describe_device()}", flush=True)
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "test_smoke.py"), *sys.argv[1:]]
        devices = ["cpu"] * args.workers + ["gpu"] if torch.cuda.is_available() else [""] * args.workers
        processes = [subprocess.Popen([*command, "--worker", folder, str(i), device], env={
            **os.environ, "OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
            # read when triton is first imported, which may be before tests/conftest.py is
            **({} if device == "gpu" else {"TRITON_INTERPRET": "1"})})
            for i, device in enumerate(devices)]

        def stop(number, frame):
            for process in processes:
                process.send_signal(signal.SIGINT)   # pytest's way to end: fixtures are cleaned up
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        codes = [process.wait() for process in processes]
        files = [Path(folder) / f"{i}.json" for i in range(len(devices))]
        results = [json.loads(f.read_text()) if f.exists() else None for f in files]
    return report(results, codes, time.time() - start)


def report(results, codes, seconds):
    """Prints what became of the tests of all processes, pytest's closing line last -> the exit code."""
    counts, skips, failures, by_file, seconds_of = Counter(), {}, [], {}, Counter()
    for i, (result, code) in enumerate(zip(results, codes)):
        if result is None:   # killed, or crashed in C code
            failures.append(["ERROR", f"test process {i} ended with code {code} and no result"])
            counts["error"] += 1
            continue
        failures += result["failures"]
        for reason, test in result["skips"]:
            skips.setdefault(reason, []).append(test)
        for test, word, s in result["tests"]:
            file = test.split("::")[0]
            by_file.setdefault(file, Counter())[word] += bool(word)
            seconds_of[file] += s
            seconds_of[test] += s
            counts[word] += bool(word)
    print("\n")
    for file, c in sorted(by_file.items()):
        print(f"{file:<32} {seconds_of[file]:6.1f} s  {words(c)}")
    tests = sorted(((s, t) for t, s in seconds_of.items() if "::" in t), reverse=True)
    print("slowest: " + ", ".join(f"{t.split('::', 1)[1]} {s:.1f} s" for s, t in tests[:6]))
    print("skipped:" + ("" if skips else " nothing"))
    for reason, tests in sorted(skips.items()):
        fine = reason.startswith(ALLOWED_SKIPS)
        print(f"  {len(tests):3} {reason}" + ("" if fine else f"  <- not an allowed reason: {', '.join(tests)}"))
        if not fine:
            failures.append(["FAILED", f"skips for {reason!r}, which is not in ALLOWED_SKIPS"])
            counts["failed"] += 1
    for word, name in failures:
        print(f"{word} {name}")
    ran = counts["passed"] + counts["failed"] + counts["error"] + counts["skipped"]
    if 2 in codes:
        print("INTERRUPTED: the rest did not run")
    code = 2 if 2 in codes else 1 if failures else 0 if ran else 5   # as pytest's: interrupted, failed, fine, no tests
    print(f"device: {describe_device()}")
    minutes = f" ({seconds // 3600:.0f}:{seconds // 60 % 60:02.0f}:{seconds % 60:02.0f})" if seconds >= 60 else ""
    print(f" {words(counts)} in {seconds:.2f}s{minutes} ".center(100, "="))
    return code


# ----------------------------------------------------------------------------------------------------------------------
# Every script and arm, as a user starts it

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model folder, a tasks folder, a textbook and a text of a few rows."""
    import helpers
    from conftest import train_guesser
    folder = tmp_path_factory.mktemp("small")
    train_guesser(folder / "model")
    (folder / "tasks").mkdir()
    for first, split in enumerate(("train", "heldout-same", "heldout-different")):
        helpers.write_rows(folder / "tasks" / f"{split}.jsonl",
                           [helpers.problem(i, f"{i}?", 1 + i % 2) for i in range(8 * first, 8 * first + 8)])
    helpers.write_rows(folder / "sft.jsonl", [
        {"prompt": helpers.problem(i, f"{i + 50}?", 1)["prompt"],   # none of the held-out problems
         "completion": [{"role": "assistant", "content": f"#### {1 + i % 2}"}]} for i in range(8)])
    helpers.write_rows(folder / "text.jsonl", [{"text": f"{i} and {i}"} for i in range(20)])
    return folder


SMALL = {"--max-steps": 2, "--prompts-per-step": 2, "--num-generations": 4, "--max-new": 24, "--lr": "1e-3",
         "--limit": 2, "--eval-n": 2}
ARM_NEEDS = {"grpo_length_penalty": ["--lam", 0.5]}


def task_flags(small):
    return ["--model", small / "model", "--tasks-dir", small / "tasks", "--max-new", 8, "--lr", "1e-3", "--limit", 2,
            "--eval-n", 2, "--max-steps", 2]


def arm_commands():
    """(script, the flags of one arm) for every training script."""
    for name in TRAINERS:
        module = importlib.import_module(name)
        for arm in getattr(module, "ARMS", [None]):
            yield pytest.param(name, arm, id=f"{name} {arm or ''}".strip())


def arm_flags(name, arm, small):
    """The flags of two steps of a script's arm on small things."""
    own = {"pretrain": ["--data", small / "text.jsonl", "--tokenizer", small / "model", "--valid-rows", 4,
                        "--hidden", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--ffn", 16,
                        "--batch-tokens", 40],
           "train_sft": ["--data", small / "sft.jsonl", "--rows-per-step", 4]}.get(name, [])
    known = flags_of(name)
    flags = [x for flag, value in SMALL.items() if flag in known and flag not in own for x in (flag, value)]
    if name != "pretrain":
        flags += ["--model", small / "model", "--tasks-dir", small / "tasks"]
    return [*flags, *own, *(["--arm", arm] if arm else []), *ARM_NEEDS.get(arm, [])]


@pytest.mark.parametrize("name, arm", list(arm_commands()))
def test_every_script_and_arm_runs(name, arm, small, tmp_path):
    from helpers import run_script
    from launch import run

    import common
    # one arm of a script in a process of its own; the others by the quick way, which starts the same code
    first = arm in (None, next(iter(getattr(importlib.import_module(name), "ARMS", [None]))))
    got = (run_script if first else run)(f"{name}.py", *arm_flags(name, arm, small), "--output-dir", tmp_path / "run",
                                         "--labbook", tmp_path / "labbook.md")
    assert got.returncode == 0, got.stderr
    assert str(tmp_path / "run") in got.stdout.splitlines()[-1]
    records, problems = common.read_labbook(tmp_path / "labbook.md")
    assert not problems and [r["kind"] for r in records] == ["start", "run"] and records[1]["status"] == "ok"
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert {p.name for p in (tmp_path / "run" / "checkpoint").iterdir()} >= {"config.json", "model.safetensors",
                                                                            "tokenizer.json", "resume.pt"}


def test_evaluation_runs(small, tmp_path):
    from helpers import run_script
    out = tmp_path / "out.json"
    got = run_script("eval_passk.py", "--model", small / "model", "--tasks-dir", small / "tasks", "--n", 4, "--k", 1, 4,
                     "--max-new", 8, "--limit", 3, "--out", out, "--labbook", tmp_path / "labbook.md")
    assert got.returncode == 0, got.stderr
    result = json.loads(out.read_text())
    assert result["pass_at"].keys() == {"1", "4"} and len(result["problems"]) == 3
    assert len(Path(f"{out}.samples.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name):
    from launch import run
    got = run(f"{name}.py", "--help")
    assert got.returncode == 0 and got.stderr == ""
    assert "--" in got.stdout and importlib.import_module(name).__doc__.split()[0] in got.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Wrong commands: one line on stderr, exit code 2, nothing written

GRPO = ["--max-steps", 2]
WRONG = {
    "unknown flag": ("train_grpo", [*GRPO, "--banana", 3], ["--banana"]),
    "abbreviated flag": ("train_grpo", ["--max-step", 2], ["--max-step"]),
    "flag without value": ("train_grpo", [*GRPO, "--lr"], ["--lr"]),
    "flag that the arm does not read": ("train_grpo", [*GRPO, "--arm", "grpo", "--lam", 0.5],
                                        ["--lam", "grpo_length_penalty"]),
    "arm without its flag": ("train_grpo", [*GRPO, "--arm", "grpo_length_penalty"],
                            ["--lam", "from 0 to under 1"]),
    "unknown arm": ("train_grpo", [*GRPO, "--arm", "ppo"], ["ppo", "grpo_length_penalty"]),
    "lam 1.0": ("train_grpo", [*GRPO, "--arm", "grpo_length_penalty", "--lam", "1.0"], ["--lam 1", "under 1"]),
    "indivisible steps": ("train_grpo", ["--max-steps", 7, "--updates-per-rollout", 2], ["7", "2", "6 works"]),
    "nan": ("train_grpo", [*GRPO, "--lr", "nan"], ["--lr", "nan"]),
    "infinite": ("train_grpo", [*GRPO, "--temperature", "inf"], ["--temperature", "inf"]),
    "negative": ("train_grpo", [*GRPO, "--beta", "-0.1"], ["--beta", "-0.1"]),
    "negative steps": ("train_grpo", ["--max-steps", "-3"], ["--max-steps", "-3"]),
    "not a number": ("train_grpo", ["--max-steps", "ten"], ["--max-steps", "ten"]),
    "a group of one": ("train_grpo", [*GRPO, "--num-generations", 1], ["--num-generations", "1"]),
    "temperature 0": ("train_grpo", [*GRPO, "--temperature", 0], ["--temperature", "0"]),
    "clip of 1": ("train_grpo", [*GRPO, "--eps", 1], ["--eps"]),
    "old name batch-size": ("train_grpo", [*GRPO, "--batch-size", 8], ["--batch-size", "--prompts-per-step"]),
    "old name grad-accum": ("train_grpo", [*GRPO, "--grad-accum=8"], ["--grad-accum", "--micro-batch-tokens"]),
    "old name data-dir": ("train_grpo", [*GRPO, "--data-dir", "x"], ["--data-dir", "--tasks-dir"]),
    "old name vllm-colocate": ("train_grpo", [*GRPO, "--rollouts", "vllm-colocate"], ["vllm-colocate", "--rollouts"]),
    "another model without lr": ("train_grpo", [*GRPO, "--model", "some/model"], ["--lr", "some/model", "--preset"]),
    "unknown preset": ("train_grpo", [*GRPO, "--preset", "gpt-5"], ["gpt-5", "qwen-1.5b"]),
    "unknown task": ("train_grpo", [*GRPO, "--task", "chess"], ["chess", "arithmetic"]),
    "unknown device": ("train_grpo", [*GRPO, "--device", "abacus"], ["abacus"]),
    "resume of nothing": ("train_grpo", ["--resume", "NOWHERE"], ["NOWHERE"]),
    "no data": ("train_sft", [], ["--data"]),
    "data that is not there": ("train_sft", ["--data", "NOWHERE.jsonl"], ["NOWHERE.jsonl"]),
    "sft: unknown flag": ("train_sft", ["--data", "x", "--lam", 0.5], ["--lam"]),
    "heads that do not divide": ("pretrain", ["--hidden", 100, "--heads", 6], ["100", "6", "96 works"]),
    "pretrain: no text": ("pretrain", ["--data", "NOWHERE.jsonl"], ["NOWHERE.jsonl"]),
    "k above n": ("eval_passk", ["--n", 4, "--k", 8], ["8", "4"]),
    "n 0": ("eval_passk", ["--n", 0], ["--n"]),
    "two sources of tasks": ("eval_passk", ["--tasks", "x", "--split", "y"], ["--tasks", "--split"]),
    "split that is not there": ("eval_passk", ["--split", "heldout-none"], ["heldout-none"]),
}


def nothing_was_written(tmp_path, before):
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", WRONG)
def test_wrong_commands(name, small, tmp_path):
    from launch import refused, run
    script, flags, said = WRONG[name]
    if "--model" not in flags and script != "pretrain":
        flags = ["--model", small / "model", *([] if script == "eval_passk" else ["--lr", 1e-3]), *flags]
    if "--tasks-dir" not in map(str, flags) and script != "pretrain" and name != "unknown task":
        flags = ["--tasks-dir", small / "tasks", *flags]
    if script != "eval_passk":
        flags = [*flags, "--output-dir", tmp_path / "run", "--labbook", tmp_path / "labbook.md"]
        if "--resume" in flags:
            flags = ["--resume", "NOWHERE"]
    if name == "pretrain: no text":
        flags = ["--tokenizer", small / "model", *flags]
    refused(run(f"{script}.py", *flags, cwd=tmp_path), *said)
    nothing_was_written(tmp_path, [])


TASK_FILES = {   # content of train.jsonl -> what the error names
    "empty": ("", ["train.jsonl", "no rows"]),
    "not JSON": ('{"id": "a"\n', ["train.jsonl:1"]),
    "not an object": ("[1]\n", ["train.jsonl:1", "object"]),
    "key missing": ('{"id": "a", "prompt": [{"role": "user", "content": "x"}]}\n', ["train.jsonl:1", "answer"]),
    "prompt a text": ('{"id": "a", "prompt": "x", "answer": 1}\n', ["train.jsonl:1", "prompt"]),
    "message without role": ('{"id": "a", "prompt": [{"content": "x"}], "answer": 1}\n', ["train.jsonl:1", "role"]),
    "answer no number": ('{"id": "a", "prompt": [{"role": "user", "content": "x"}], "answer": "many"}\n',
                         ["train.jsonl:1", "many"]),
    "an id twice": ('{"id": "a", "prompt": [{"role": "user", "content": "x"}], "answer": 1}\n' * 2,
                    ["train.jsonl", "'a'"]),
    "second row": ('{"id": "a", "prompt": [{"role": "user", "content": "x"}], "answer": 1}\n{}\n', ["train.jsonl:2"]),
    "no UTF-8": (b"\xff\xfe\x00", ["train.jsonl"]),
}


@pytest.mark.parametrize("split", ["train", "heldout-same"])
@pytest.mark.parametrize("name", TASK_FILES)
def test_malformed_task_files(name, split, small, tmp_path):
    """Also in a held-out file, which the run would reach much later."""
    from launch import refused, run
    content, said = TASK_FILES[name]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for path in (small / "tasks").iterdir():
        (tasks / path.name).write_bytes(path.read_bytes())
    (tasks / f"{split}.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    got = run("train_grpo.py", *task_flags(small), "--tasks-dir", tasks, "--output-dir", tmp_path / "run", "--labbook",
              tmp_path / "labbook.md")
    refused(got, *(word.replace("train", split) for word in said))
    nothing_was_written(tmp_path, before)


MODELS = {   # what is done to a copy of the model folder -> what the error names
    "no folder": (None, ["model"]),
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json"]),
    "config is no JSON": (lambda m: (m / "config.json").write_text("{"), ["config.json", "JSON"]),
    "no architectures": (lambda m: edit(m, architectures=None), ["architectures"]),
    "unknown architecture": (lambda m: edit(m, architectures=["BertModel"]), ["BertModel"]),
    "wrong width": (lambda m: edit(m, intermediate_size=50), ["shape", "50"]),
    "a layer too many": (lambda m: edit(m, num_hidden_layers=3), ["missing", "layers.2"]),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ["model.safetensors"]),
    "torn weights": (lambda m: (m / "model.safetensors").write_bytes(b"\0" * 40), ["model.safetensors"]),
    "no tokenizer": (lambda m: [p.unlink() for p in m.glob("tokenizer*")], ["tokenizer"]),
    "no chat template": (lambda m: drop_template(m), ["chat template", "--template"]),
}


def edit(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def drop_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    raw = json.loads(path.read_text())
    raw.pop("chat_template", None)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("name", MODELS)
def test_broken_models(name, small, tmp_path):
    from launch import refused, run
    damage, said = MODELS[name]
    model = tmp_path / "model"
    if damage:
        model.mkdir()
        for path in (small / "model").iterdir():
            (model / path.name).write_bytes(path.read_bytes())
        damage(model)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    got = run("train_grpo.py", *task_flags(small), "--model", model, "--output-dir", tmp_path / "run", "--labbook",
              tmp_path / "labbook.md")
    refused(got, *said)
    nothing_was_written(tmp_path, before)


def test_places_that_cannot_be_written(small, tmp_path):
    from launch import refused, run
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    for out, book, said in [("taken", "labbook.md", ["taken", "exists"]),
                            ("run", "nowhere/labbook.md", ["nowhere/labbook.md"]),
                            ("run", "taken", ["--labbook", "taken"]),
                            ("file/run", "labbook.md", ["file/run"])]:
        got = run("train_grpo.py", *task_flags(small), "--output-dir", tmp_path / out, "--labbook", tmp_path / book)
        refused(got, *said)
        nothing_was_written(tmp_path, [Path("file"), Path("taken")])


# ----------------------------------------------------------------------------------------------------------------------
# The rules of the house

# Defaults that differ between scripts on purpose: pretraining and SFT run to a planned end, an evaluation is asked for
DIFFER = {"--lr": "a new model learns faster", "--warmup": "as --lr", "--schedule": "decay to a planned end",
          "--max-steps": "SFT counts --epochs", "--labbook": "an evaluation is recorded when asked",
          "--data": "other rows", "--seed": "an evaluation trains nothing", "--arm": "each script has its own",
          "--keep": "eval_passk.py keeps problems, a run keeps checkpoints", "--output-dir": "report.py makes no run"}


def flags_of(name):
    """The parser's actions of a script, by flag."""
    seen = {}

    def watch(parser, argv=None, namespace=None):
        seen.update({a.option_strings[0]: a for a in parser._actions if a.option_strings})
        raise InterruptedError
    module = importlib.import_module(name)
    before, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, watch
    try:
        module.get_args([])
    except InterruptedError:
        pass
    finally:
        argparse.ArgumentParser.parse_args = before
    return seen


@pytest.mark.parametrize("name", SCRIPTS)
def test_shared_flags_are_the_same_everywhere(name):
    mine, others = flags_of(name), {n: flags_of(n) for n in SCRIPTS if n != name}
    assert name not in TRAINERS or {"--notes", "--device", "--resume", "--seed"} <= mine.keys()
    for other, theirs in others.items():
        for flag in mine.keys() & theirs.keys() - DIFFER.keys():
            a, b = mine[flag], theirs[flag]
            assert (a.default, a.help) == (b.default, b.help), f"{flag} in {name}.py and {other}.py"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_has_a_help_text_in_small_letters_and_dashes(name):
    for flag, action in flags_of(name).items():
        assert re.fullmatch(r"-h|--[a-z0-9]+(-[a-z0-9]+)*", flag), flag
        assert action.help and len(action.help) > 5, flag


def readme_commands():
    path = ROOT / "README.md"
    blocks = re.findall(r"```[a-z]*\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL) if path.exists() else []
    lines = [part.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()
             for part in line.split("&&")]
    return [line for line in lines if line.startswith("python ")]


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module   # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_readme_commands_parse(capsys, tmp_path, monkeypatch):
    """Every `python SCRIPT.py ...` of the README is taken by that script's parser."""
    commands = readme_commands()
    monkeypatch.chdir(tmp_path)   # here a reader may have run them, and a pool is written once
    assert len(commands) >= 5, "README.md shows the commands that a newcomer types"
    for line in commands:
        _, script, *argv = shlex.split(line, comments=True)
        if script == "-c":   # not ours: it is run by tests/test_report.py
            continue
        assert (ROOT / script).exists(), line
        if "--resume" in argv:   # RUN stands for a folder that the reader has
            assert argv[argv.index("--resume") + 1].startswith("runs/"), line
            argv = [a for i, a in enumerate(argv) if a != "--resume" and (i == 0 or argv[i - 1] != "--resume")]
        try:
            load_script(script).get_args(argv)
        except SystemExit as e:
            assert e.code in (0, None), f"{line}\n{capsys.readouterr().err}"


HOUSE = set("README.md requirements.txt LICENSE labbook.md pyproject.toml .gitignore model.py engine.py common.py "
            "envs.py sandbox.py pretrain.py train_sft.py train_grpo.py train_rft.py train_opd.py eval_passk.py "
            "report.py bench.py test_smoke.py".split())


def tracked_files():
    got = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if got.returncode:   # an unpacked archive; a prepared.json is of the person who has it
        return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts
                and p.name != "prepared.json"]
    return [name for name in got.stdout.splitlines() if (ROOT / name).exists()]


def test_top_level_holds_the_house_and_what_the_readme_names():
    top = {name for name in tracked_files() if "/" not in name}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in top - HOUSE if f"`{name}`" not in readme} == set()
    assert {"README.md", "LICENSE", "requirements.txt", "common.py", "test_smoke.py"} <= top


def test_imports_go_one_way():
    """Scripts import eval_passk, envs, engine, model, common; nothing imports a training script."""
    order = ["fused", "common", "model", "engine", "sandbox", "envs", "eval_passk"]
    ours = set(order) | set(SCRIPTS)
    may = {"fused": set(), "common": {"fused"}, "model": {"fused", "common"},
           "engine": {"model", "common"}, "sandbox": set(), "envs": {"sandbox", "common"},
           "eval_passk": {"envs", "engine", "model", "common"},
           "bench": set(order) | {"train_grpo"}}   # what it times is the loss that the script computes
    for name in ours:
        if not (ROOT / f"{name}.py").exists():
            continue
        found = set()
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
        assert (found & ours) <= may.get(name, set(order)), name


def test_the_method_is_not_in_common():
    """Advantage, teacher and arm live in the training scripts; common.py knows `arm` as a field of records alone."""
    text = (ROOT / "common.py").read_text(encoding="utf-8")
    assert not re.search(r"advantage|teacher|\bARMS\b", text, re.IGNORECASE)
    assert not re.search(r"args\.arm|arm ==", text)


def test_labbook_chain_is_whole():
    import common
    if (ROOT / "labbook.md").exists():
        _, problems = common.read_labbook(ROOT / "labbook.md")
        assert not problems, problems


def test_no_file_names_a_path_of_a_machine():
    """Home folders and folders of one machine; /tmp, /proc, /dev and /usr are everywhere."""
    folders = ["ro" "ot", "ho" "me/\\w+", "Us" "ers/\\w+", "wo" "rk", "mn" "t"]   # split, or this line were found
    private = re.compile(r"(?<![\w.~-])/(?:" + "|".join(folders) + r")/[\w.-]")
    found = []
    for name in tracked_files():
        if name.endswith((".safetensors", ".png", ".jsonl")) or name.startswith("tests/sandbox_cases/"):
            continue   # the sandbox's attacks do look into such folders
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {m.group(0)}" for m in private.finditer(text)]
    assert not found, found


@pytest.mark.parametrize("name", TRAINERS)
def test_a_training_script_is_safe_to_import_and_says_what_to_expect(name):
    module = importlib.import_module(name)
    text = inspect.getsource(module)
    assert 'if __name__ == "__main__":' in text and "Laptop:" in module.__doc__ and "GPU:" in module.__doc__
    assert list(inspect.signature(module.get_args).parameters) == ["argv"]


if __name__ == "__main__":
    sys.exit(main())
