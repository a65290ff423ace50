"""
The training scripts as commands: resume, signals, kill -9, full disks, refusals, records. Runs are those of a tiny
model (see conftest.py) and take a second; exit codes, signals and files are real.
"""
import fcntl
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from helpers import EOS, ROOT, problem, read_rows, run_script, script_env, tiny_tokenizer, write_rows
from launch import FORK, jsonl, metrics, refused, run, start, weights
from safetensors.torch import load_file, save_file

import common
from model import load_model, save_model

torch.set_num_threads(1)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


# ----------------------------------------------------------------------------------------------------------------------
# Commands of one second

def grpo_flags(folder, guesser, tasks, *more, labbook=None):
    return ["train_grpo.py", "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", 24, "--eval-n", 0,
            "--warmup", 0, "--prompts-per-step", 4, "--labbook", labbook or folder.parent / "labbook.md",
            "--output-dir", folder, *more]


def sft_flags(folder, guesser, tasks, *more):
    data = folder.parent / "sft.jsonl"
    if not data.exists():
        write_rows(data, [{"prompt": problem(i, f"{i + 100}?", 1)["prompt"],   # none of the held-out problems
                           "completion": [{"role": "assistant", "content": "#### " + str(i % 3)}]} for i in range(20)])
    return ["train_sft.py", "--data", data, "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--eval-n", 0,
            "--rows-per-step", 8, "--labbook", folder.parent / "labbook.md", "--output-dir", folder, *more]


def pretrain_flags(folder, guesser, tasks, *more):
    data = folder.parent / "text.jsonl"
    if not data.exists():
        write_rows(data, [{"text": f"{i} and {i} are {2 * i}. " * (1 + i % 3)} for i in range(60)])
    return ["pretrain.py", "--data", data, "--tokenizer", guesser, "--valid-rows", 5, "--hidden", 32, "--layers", 2,
            "--heads", 4, "--kv-heads", 2, "--ffn", 48, "--context", 64, "--batch-tokens", 400, "--warmup", 2,
            "--labbook", folder.parent / "labbook.md", "--output-dir", folder, *more]


FLAGS = {"grpo": grpo_flags, "sft": sft_flags, "pretrain": pretrain_flags}


def succeed(*command, **how):
    got = run(*command, **how)
    assert got.returncode == 0, got.stderr[-2000:]
    return got


def records(folder):
    found, problems = common.read_labbook(folder.parent / "labbook.md")
    assert not problems
    return [r for r in found if r["run_id"] == folder.name]


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def same_run(a, b):
    """The same steps, the same samples byte for byte, the same weights bit for bit."""
    assert metrics(a) == metrics(b)
    assert (a / "samples.jsonl").exists() == (b / "samples.jsonl").exists()
    if (a / "samples.jsonl").exists():
        assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert weights(a) == weights(b)


# ----------------------------------------------------------------------------------------------------------------------
# Resume (X41)

def kill_and_resume(kind, folder, guesser, tasks, kill_after, *more):
    """Kills the run with SIGKILL once `kill_after` rows stand in metrics.jsonl, and resumes it to its end."""
    child = start(*FLAGS[kind](folder, guesser, tasks, *more))
    child.until(lambda: lines_in(folder / "metrics.jsonl") >= kill_after and (folder / "checkpoint").exists())
    child.kill(signal.SIGKILL)
    assert child.wait().returncode == -signal.SIGKILL
    assert not (folder / "final.json").exists()
    script, labbook = FLAGS[kind](folder, guesser, tasks)[0], folder.parent / "labbook.md"
    succeed(script, "--resume", folder, "--labbook", labbook)
    assert [r["status"] for r in records(folder) if r["kind"] == "run"] == ["ok"]
    assert json.loads((folder / "final.json").read_text())["status"] == "ok"


# 12 problems, 4 a step: 3 steps are an epoch. With 2 updates a rollout a checkpoint falls on even steps.
GRPO_CUTS = [("in the middle", 12, 5, ["--save-every", 4]), ("at an epoch's end", 12, 3, ["--save-every", 3]),
             ("two updates", 12, 4, ["--save-every", 3, "--updates-per-rollout", 2]),
             ("with KL", 8, 3, ["--save-every", 2, "--beta", 0.1])]


@pytest.mark.parametrize("name, steps, kill_after, more",
                         [pytest.param(*c, marks=[pytest.mark.slow] if i > 1 else [], id=c[0])
                          for i, c in enumerate(GRPO_CUTS)])
def test_killed_and_resumed_grpo_is_the_run_that_was_never_stopped(name, steps, kill_after, more, guesser, tasks,
                                                                   tmp_path):
    more = [*more, "--max-steps", steps]
    succeed(*grpo_flags(tmp_path / "whole", guesser, tasks, *more))
    kill_and_resume("grpo", tmp_path / "cut", guesser, tasks, kill_after, *more)
    same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_killed_and_resumed_run_is_the_run_that_was_never_stopped(kind, guesser, tasks, tmp_path):
    more = ["--max-steps", 30, "--save-every", 4]
    succeed(*FLAGS[kind](tmp_path / "whole", guesser, tasks, *more))
    kill_and_resume(kind, tmp_path / "cut", guesser, tasks, 6, *more)
    same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("kind", ["grpo", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_finished_run_goes_on_with_more_steps(kind, guesser, tasks, tmp_path):
    """3 steps, then --resume --max-steps 6: as 6 at once, where the schedule does not look at the end."""
    more = ["--schedule", "constant"]
    succeed(*FLAGS[kind](tmp_path / "whole", guesser, tasks, "--max-steps", 6, *more))
    succeed(*FLAGS[kind](tmp_path / "part", guesser, tasks, "--max-steps", 3, *more))
    succeed(FLAGS[kind](tmp_path / "part", guesser, tasks)[0], "--resume", tmp_path / "part", "--max-steps", 6,
            "--labbook", tmp_path / "labbook.md")
    same_run(tmp_path / "whole", tmp_path / "part")
    ends = [r for r in records(tmp_path / "part") if r["kind"] == "run"]
    assert [r["config"]["max_steps"] for r in ends] == [3, 6]
    assert ends[1]["budget"]["tokens_trained"] == records(tmp_path / "whole")[-1]["budget"]["tokens_trained"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_same_seed_same_metrics(kind, guesser, tasks, tmp_path):
    for name in ("a", "b"):
        succeed(*FLAGS[kind](tmp_path / name, guesser, tasks, "--max-steps", 4))
    same_run(tmp_path / "a", tmp_path / "b")
    succeed(*FLAGS[kind](tmp_path / "c", guesser, tasks, "--max-steps", 4, "--seed", 1))
    assert metrics(tmp_path / "c") != metrics(tmp_path / "a")


@pytest.mark.slow
def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(guesser, tasks, tmp_path):
    """A checkpoint every step, killed at random: the link always leads to one that loads, and the run goes on."""
    draw, before, last = random.Random(0), None, grpo_flags(tmp_path / "run", guesser, tasks)
    folder = tmp_path / "run"
    for attempt in range(8):
        command = last + ["--max-steps", 2000, "--save-every", 1] if attempt == 0 else [
            "train_grpo.py", "--resume", folder, "--labbook", tmp_path / "labbook.md"]
        child = start(*command)
        child.until(lambda: (folder / "checkpoint").exists())
        seen = lines_in(folder / "metrics.jsonl")
        child.until(lambda seen=seen: lines_in(folder / "metrics.jsonl") > seen or seen == 0)
        time.sleep(draw.random() * 0.2)
        child.kill(signal.SIGKILL)
        child.wait()
        model = load_model(folder / "checkpoint")
        state = torch.load(folder / "checkpoint" / "resume.pt", weights_only=True)
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert before is None or state["step"] >= before
        before = state["step"]
    assert before >= 2


def test_a_torn_last_line_is_cut_and_odd_line_breaks_are_not(tmp_path):
    """Texts of a model may hold U+2028 or U+0085, which are line breaks to Python but not to JSON lines."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": s, "text": f"a\u2028b\u0085c{s}"} for s in (1, 2, 3)]
    common.append_jsonl(folder / "samples.jsonl", rows)
    with open(folder / "samples.jsonl", "a") as f:
        f.write('{"step": 1, "tex')
    fake = common.Run.__new__(common.Run)
    fake.folder = folder
    fake.restore(2, {"budget": {}, "wall_s": 1.0, "scores": {}})
    assert common.read_jsonl(folder / "samples.jsonl") == rows[:2]


def test_a_record_may_hold_odd_line_breaks(tmp_path):
    for i in range(3):
        common.append_record(tmp_path / "labbook.md", {"kind": "data", "notes": f"a\u2028{{b\u0085{i}"}, "prose")
    found, problems = common.read_labbook(tmp_path / "labbook.md")
    assert not problems and [r["notes"][-1] for r in found] == ["0", "1", "2"]


# ----------------------------------------------------------------------------------------------------------------------
# What a resumed run refuses

@pytest.fixture(scope="module")
def finished(guesser, tasks, tmp_path_factory):
    """A finished run of two steps with its own copies of model and tasks -> its folder."""
    base = tmp_path_factory.mktemp("finished")
    shutil.copytree(guesser, base / "model")
    shutil.copytree(tasks, base / "tasks")
    succeed(*grpo_flags(base / "run", base / "model", base / "tasks", "--max-steps", 2))
    return base / "run"


def resume(folder, *more, script="train_grpo.py"):
    return run(script, "--resume", folder, "--labbook", folder.parent / "labbook.md", *more)


@pytest.mark.parametrize("flag, value", [("--lr", "0.002"), ("--seed", "1"), ("--num-generations", "4"),
                                         ("--arm", "grpo_length_penalty"), ("--output-dir", "elsewhere")])
def test_resume_with_another_flag_is_refused_by_name(finished, flag, value):
    before = (finished.parent / "labbook.md").read_bytes()
    refused(resume(finished, flag, value), flag, value, "--max-steps")
    assert (finished.parent / "labbook.md").read_bytes() == before


def test_resume_with_the_same_flags_and_more_steps_is_fine(finished, tmp_path):
    shutil.copytree(finished.parent, tmp_path / "copy", symlinks=True)
    succeed("train_grpo.py", "--resume", tmp_path / "copy" / "run", "--lr", "1e-3", "--max-steps", 3, "--labbook",
            finished.parent / "labbook.md")


@pytest.mark.parametrize("steps", ([], ["--max-steps", 1]))
def test_resume_with_nothing_left_to_do_writes_nothing(finished, steps):
    before = {p: p.read_bytes() for p in (finished.parent / "labbook.md", finished / "final.json")}
    refused(resume(finished, *steps), "nothing is left to do", "--max-steps")
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("fault", ("no checkpoint", "cut short"))
def test_resume_of_a_broken_checkpoint_writes_nothing(finished, tmp_path, fault):
    shutil.copytree(finished.parent, tmp_path / "copy", symlinks=True)
    folder = tmp_path / "copy" / "run"
    state = folder / "checkpoint" / "resume.pt"
    if fault == "cut short":
        state.write_bytes(state.read_bytes()[:1000])
    else:
        (folder / "checkpoint").unlink()
    book = finished.parent / "labbook.md"
    before = {p: p.read_bytes() for p in (book, folder / "final.json")}
    refused(run("train_grpo.py", "--resume", folder, "--max-steps", 3, "--labbook", book),
            "resume.pt" if fault == "no checkpoint" else "not whole")
    assert {p: p.read_bytes() for p in before} == before


def test_resume_of_another_scripts_run_is_refused(finished):
    for script in ("train_rft.py", "train_sft.py"):   # with this script's flags, and without
        refused(resume(finished, "--max-steps", 3, script=script), "another script", "train_grpo.py")


@pytest.mark.parametrize("what", ["model", "tasks", "script"])
def test_resume_after_a_file_has_changed_is_refused(finished, what):
    base = finished.parent
    path = {"model": base / "model" / "model.safetensors", "tasks": base / "tasks" / "train.jsonl",
            "script": finished / "config.json"}[what]
    before, book = path.read_bytes(), (base / "labbook.md").read_bytes()
    try:
        if what == "model":
            tensors = load_file(path)
            tensors["model.norm.weight"] += 1
            save_file(tensors, path, metadata={"format": "pt"})
        elif what == "tasks":
            path.write_bytes(before + json.dumps(problem(99, "99?", 1)).encode() + b"\n")
        else:   # as if the script had been edited since
            config = json.loads(before)
            path.write_text(json.dumps({**config, "script_sha256": "0" * 64}))
        refused(resume(finished, "--max-steps", 3),
                {"model": "the model", "tasks": "train.jsonl", "script": "the script"}[what], "has changed",
                "0" * 12 if what == "script" else "then")
    finally:
        path.write_bytes(before)
    assert (base / "labbook.md").read_bytes() == book


def test_resume_of_what_is_no_run_is_refused(tmp_path):
    refused(run("train_grpo.py", "--resume", tmp_path), tmp_path, "config.json")
    refused(run("train_grpo.py", "--resume", tmp_path / "none"), tmp_path / "none")


# ----------------------------------------------------------------------------------------------------------------------
# Signals

@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_saves_and_records_and_resume_goes_on(name, code, guesser, tasks, tmp_path):
    steps = ["--max-steps", 400 if name == "SIGINT" else 14]
    folder = tmp_path / "run"
    child = start(*grpo_flags(folder, guesser, tasks, *steps))
    child.until(lambda: lines_in(folder / "metrics.jsonl") >= 2)
    child.kill(getattr(signal, name))
    got = child.wait()
    assert got.returncode == code, got.stderr
    assert got.stderr == "" and f"{name}, all saved" in got.stdout.splitlines()[-1]
    last = records(folder)[-1]
    assert (last["kind"], last["status"]) == ("run", "stopped") and name in last["notes"]
    done = lines_in(folder / "metrics.jsonl")
    assert torch.load(folder / "checkpoint" / "resume.pt", weights_only=True)["step"] == done
    assert (folder / "curves.csv").exists() and (folder / "curves.png").exists()
    if name == "SIGTERM":
        succeed("train_grpo.py", "--resume", folder, "--labbook", tmp_path / "labbook.md")
        succeed(*grpo_flags(tmp_path / "whole", guesser, tasks, *steps))
        same_run(tmp_path / "whole", folder)
        assert [r["status"] for r in records(folder) if r["kind"] == "run"] == ["stopped", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_a_signal_stops_the_other_scripts_too(kind, guesser, tasks, tmp_path):
    folder = tmp_path / "run"
    child = start(*FLAGS[kind](folder, guesser, tasks, "--max-steps", 3000))
    child.until(lambda: lines_in(folder / "metrics.jsonl") >= 2)
    child.kill(signal.SIGTERM)
    assert child.wait().returncode == 143
    assert records(folder)[-1]["status"] == "stopped"


def test_a_second_signal_stops_at_once(guesser, tasks, tmp_path):
    """One step of a batch that takes minutes: the first signal waits for it, the second does not."""
    folder = tmp_path / "run"
    child = start(*grpo_flags(folder, guesser, tasks, "--num-generations", 20000, "--max-steps", 2))
    child.until(lambda: "answers a step" in child.out.read_text())
    child.kill(signal.SIGINT)
    child.until(lambda: "SIGINT" in child.out.read_text())
    child.kill(signal.SIGINT)
    got = child.wait(60)
    assert got.returncode == 130 and len(got.stderr.splitlines()) == 1, got.stderr
    assert records(folder)[-1]["kind"] == "run"


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite

def poisoned(folder, guesser):
    model = load_model(guesser)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    save_model(model, folder, tiny_tokenizer())
    return folder


def test_a_loss_that_is_not_finite_stops_the_run(guesser, tasks, tmp_path):
    """The KL's gradient, 0 but for rounding at the first step, overflows at the second when beta is 1e23."""
    folder = tmp_path / "run"
    got = run(*grpo_flags(folder, guesser, tasks, "--beta", "1e23", "--lr", "1e-2", "--save-every", 1,
                          "--max-steps", 5))
    step = lines_in(folder / "metrics.jsonl") + 1
    assert step > 1
    refused(got, f"step {step}", "not finite", folder / f"bad-batch-{step}.pt", f"checkpoint-{step - 1:06d}", code=1)
    batch = torch.load(folder / f"bad-batch-{step}.pt", weights_only=True)
    assert batch["ids"].shape == batch["mask"].shape and len(batch["ids"]) == 32
    last = records(folder)[-1]
    assert (last["kind"], last["status"]) == ("run", "failed") and "not finite" in last["notes"]
    assert json.loads((folder / "final.json").read_text())["status"] == "failed"
    assert "RunError" in (folder / "error.txt").read_text()
    model = load_model(folder / "checkpoint")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_second_update_of_a_rollout_is_a_step_of_its_own(guesser, tasks, tmp_path):
    got = run(*grpo_flags(tmp_path / "run", guesser, tasks, "--beta", "1e23", "--lr", "1e-2", "--max-steps", 4,
                          "--updates-per-rollout", 2))
    refused(got, "step 2", "not finite", tmp_path / "run" / "bad-batch-2.pt", code=1)


@pytest.mark.parametrize("kind, more", [("grpo", []), ("sft", []), ("sft", ["--lora-rank", 2]), ("pretrain", [])])
def test_a_last_update_that_breaks_the_weights_is_not_saved_as_a_success(kind, more, guesser, tasks, tmp_path):
    folder = tmp_path / "run"
    got = run(*FLAGS[kind](folder, guesser, tasks, *more, "--lr", "1e30", "--warmup", 0, "--max-steps", 1))
    refused(got, "not finite after the last update", "--lr", "no checkpoint yet", code=1)
    assert records(folder)[-1]["status"] == "failed" and not (folder / "checkpoint").exists()


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_weights_that_are_not_finite_stop_the_run(kind, guesser, tasks, tmp_path):
    folder = tmp_path / "run"
    got = run(*FLAGS[kind](folder, poisoned(tmp_path / "model", guesser), tasks, "--max-steps", 2))
    refused(got, "not finite" if kind == "sft" else "finite", "no checkpoint yet", code=1)
    if kind == "sft":
        refused(got, "step 1", folder / "bad-batch-1.pt", code=1)
    assert records(folder)[-1]["status"] == "failed"


# ----------------------------------------------------------------------------------------------------------------------
# Weights (X38), learning rate 0 (X32), over-long prompts (X12)

@pytest.mark.parametrize("kind", ["grpo", pytest.param("sft", marks=pytest.mark.slow)])
def test_lr_0_leaves_the_weights_and_another_does_not(kind, guesser, tasks, tmp_path):
    before = load_file(guesser / "model.safetensors")
    for lr, equal in [(0, True), ("1e-3", False)]:
        folder = tmp_path / f"lr{lr}"
        succeed(*FLAGS[kind](folder, guesser, tasks, "--max-steps", 2, "--lr", lr))
        after = load_file(folder / "checkpoint" / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[k], before[k]) for k in before) == equal
        assert (common.sha256_model(folder / "checkpoint") == common.sha256_model(guesser)) == equal
        assert sum(not torch.equal(after[k], before[k]) for k in before) == (0 if equal else len(before))


def test_over_long_prompts_are_refused_and_counted(guesser, tmp_path):
    """The model's context is 512 tokens; two of five prompts with 24 sampled tokens do not fit."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [problem(i, "x" * n, 1) for i, n in enumerate([5, 600, 7, 486, 485])]   # and 3 tokens of the template
    for split in ("train", "heldout-same", "heldout-different"):
        write_rows(tasks / f"{split}.jsonl", rows if split == "train" else [problem(9, "9?", 1)])
    got = succeed(*grpo_flags(tmp_path / "run", guesser, tasks, "--max-steps", 2))
    assert "refused 2 of 5 problems" in got.stdout and "refused 2 of 5" in records(tmp_path / "run")[-1]["notes"]
    seen = {(r["id"], r["prompt_length"]) for r in jsonl(tmp_path / "run" / "samples.jsonl")}
    assert seen == {("p0", 8), ("p2", 10), ("p4", 488)}
    write_rows(tasks / "train.jsonl", rows[1:2])
    refused(run(*grpo_flags(tmp_path / "none", guesser, tasks)), "train.jsonl", "512")
    assert not (tmp_path / "none").exists()


def test_over_long_rows_are_dropped_and_counted(guesser, tasks, tmp_path):
    data = write_rows(tmp_path / "sft.jsonl", [
        {"prompt": problem(i, "x" * n, 1)["prompt"], "completion": [{"role": "assistant", "content": "#### 1"}]}
        for i, n in enumerate([5, 60, 7])])
    got = succeed(*sft_flags(tmp_path / "run", guesser, tasks, "--max-length", 40, "--max-steps", 1))
    assert f"{data}: dropped 1 of 3 rows" in got.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Records

@pytest.mark.parametrize("kind", ["grpo", "sft", "pretrain"])
def test_a_run_leaves_its_files_and_its_records(kind, guesser, tasks, tmp_path):
    folder, curves = tmp_path / "run", tmp_path / "curves.csv"
    flags = FLAGS[kind](folder, guesser, tasks, "--max-steps", 2, "--notes", "a note", "--price-per-hour", 2.5,
                        "--curves", curves, *([] if kind == "pretrain" else
                                              ["--eval-n", 2, "--eval-every", 1, "--limit", 2]))
    got = succeed(*flags)
    assert got.stderr == "" and str(folder) in got.stdout.splitlines()[-1]
    config = json.loads((folder / "config.json").read_text())
    assert config["argv"] == [str(x) for x in flags[1:]] and config["args"]["max_steps"] == 2
    assert (folder / flags[0]).read_bytes() == (ROOT / flags[0]).read_bytes()
    assert [r["step"] for r in metrics(folder)] == [1, 2]
    head, *lines = (folder / "curves.csv").read_text().splitlines()
    assert head.startswith("step,") and lines[-1].startswith("2,") and curves.read_text().splitlines()[0] == head
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert load_model(folder / "checkpoint").num_params() > 0
    first, last = records(folder)
    assert (first["kind"], last["kind"], last["status"]) == ("start", "run", "ok")
    assert json.loads((folder / "final.json").read_text()) == last
    assert last["notes"] == "a note" and last["script"] == flags[0][:-3] and last["seed"] == 0
    assert last["budget"]["cost"] == pytest.approx(last["budget"]["wall_s"] * 2.5 / 3600, abs=2e-4)
    for d in last["data"]:
        assert len(d["sha256"]) == 64 and d["rows"] > 0
    if kind != "pretrain":
        assert [(r["step"], r["split"]) for r in jsonl(folder / "eval.jsonl")] == [
            (s, x) for s in (0, 1, 2) for x in ("heldout-same", "heldout-different")]
        for split in ("heldout-same", "heldout-different"):
            assert {"pass@1", "pass@2", "lenient_pass@1", "greedy"} <= set(last["scores"][split]["before"])
            assert last["scores"][split].keys() == {"before", "after"}


def test_eval_seed_moves_the_evaluation_and_seed_does_not(guesser, tasks, tmp_path):
    def first_eval(name, *more):
        succeed(*grpo_flags(tmp_path / name, guesser, tasks, "--max-steps", 0, "--eval-n", 8, *more))
        rows = jsonl(tmp_path / name / "eval.jsonl")
        return [(r["mean_length"], [p["answers"] for p in r["problems"]]) for r in rows]
    plain = first_eval("plain")
    assert len(plain[0][1]) == 4
    assert first_eval("seed", "--seed", 5) == plain
    assert first_eval("eval-seed", "--eval-seed", 5) != plain
    assert len(first_eval("limit", "--limit", 2)[0][1]) == 2


def test_template_flag_changes_the_prompt(guesser, tasks, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    succeed(*grpo_flags(tmp_path / "run", guesser, tasks, "--max-steps", 1, "--template", template))
    rows = jsonl(tmp_path / "run" / "samples.jsonl")
    assert tiny_tokenizer().decode(rows[0]["ids"][:rows[0]["prompt_length"]]) == f"{rows[0]['id'][1:]}?="


def test_keep_and_save_every(guesser, tasks, tmp_path):
    folder = tmp_path / "run"
    succeed(*grpo_flags(folder, guesser, tasks, "--max-steps", 5, "--save-every", 1, "--keep", 2))
    assert sorted(p.name for p in folder.glob("checkpoint*")) == ["checkpoint", "checkpoint-000004",
                                                                  "checkpoint-000005"]
    assert os.readlink(folder / "checkpoint") == "checkpoint-000005"


def test_a_copy_of_a_script_is_a_script(guesser, tasks, tmp_path):
    """`cp train_grpo.py train_mine.py` in a copy of the project, for its runs go where the code is."""
    project = tmp_path / "project"
    project.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, project)
    shutil.copy(project / "train_grpo.py", project / "train_mine.py")
    shutil.copytree(tasks, project / "data" / "arithmetic")
    shutil.copytree(guesser, project / "data" / "tiny")
    got = succeed(project / "train_mine.py", "--max-steps", 2, "--max-new", 24, "--eval-n", 2, cwd=project)
    found, problems = common.read_labbook(project / "labbook.md")
    assert not problems and [r["script"] for r in found] == ["train_mine"] * 2 and found[-1]["status"] == "ok"
    folder = next((project / "runs").glob("train_mine-grpo-arithmetic-s0-*"))
    assert got.stdout.splitlines()[-1].endswith(str(folder)) and (folder / "train_mine.py").exists()


def test_two_runs_of_one_second_get_two_folders(guesser, tasks, tmp_path):
    """Also where both have chosen their name before either makes it."""
    book, made = tmp_path / "labbook.md", []
    args = common.Parser()
    common.add_run_flags(args)
    args = common.parse_args(args, ["--labbook", str(book)])
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}, sys.excepthook
    try:
        runs = [common.Run(args, "twin") for _ in range(3)]
        for one in runs:
            one.folder = tmp_path / "runs" / "same-name"
            one.make_folder()
            made.append(one.folder)
    finally:
        for number, handler in before[0].items():
            signal.signal(number, handler)
        sys.excepthook = before[1]
    assert len(set(made)) == 3 and all(p.is_dir() for p in made)


@pytest.mark.slow
def test_runs_side_by_side_keep_the_labbook_whole(guesser, tasks, tmp_path):
    children = [start(*grpo_flags(tmp_path / f"run{i}", guesser, tasks, "--max-steps", 1)) for i in range(4)]
    assert [c.wait().returncode for c in children] == [0] * 4
    found, problems = common.read_labbook(tmp_path / "labbook.md")
    assert not problems and sorted(r["kind"] for r in found) == ["run"] * 4 + ["start"] * 4


def test_wandb_gets_what_the_files_get(guesser, tasks, tmp_path):
    stub = tmp_path / "site"
    stub.mkdir()
    (stub / "wandb.py").write_text(
        "import json\n"
        f"out = open({str(tmp_path / 'calls.jsonl')!r}, 'a')\n"
        "def say(*call):\n    out.write(json.dumps(call) + chr(10))\n    out.flush()\n"
        "class Run:\n"
        "    def log(self, metrics, step):\n        say('log', step, metrics['reward'])\n"
        "    def finish(self):\n        say('finish')\n"
        "def init(**more):\n    say('init', more['project'], more['name'], more['config']['max_steps'])\n"
        "    return Run()\n")
    folder = tmp_path / "run"
    succeed(*grpo_flags(folder, guesser, tasks, "--max-steps", 2, "--wandb"), env={"PYTHONPATH": str(stub)})
    assert read_rows(tmp_path / "calls.jsonl") == [["init", "nanopost", "run", 2]] + [
        ["log", r["step"], r["reward"]] for r in metrics(folder)] + [["finish"]]


def test_wandb_that_is_not_there_is_refused_before_anything_is_written(guesser, tasks, tmp_path, monkeypatch):
    if not FORK:
        pytest.skip("needs Linux without CUDA in use, to hide a package from the script")
    monkeypatch.setitem(sys.modules, "wandb", None)   # the same as not installed, whatever is
    refused(run(*grpo_flags(tmp_path / "run", guesser, tasks, "--wandb")), "--wandb", "not installed")
    assert not (tmp_path / "run").exists() and not (tmp_path / "labbook.md").exists()


# ----------------------------------------------------------------------------------------------------------------------
# A full disk

@LINUX
def test_a_full_disk_is_said_in_one_line(guesser, tasks, tmp_path):
    """The run folder and the labbook lie on a small file system, which fills up while the run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk],
                                      capture_output=True).returncode:
        pytest.skip("needs root to mount a tmpfs")
    try:
        folder, book = disk / "run", disk / "labbook.md"
        child = start(*grpo_flags(folder, guesser, tasks, "--max-steps", 150, "--save-every", 1, "--keep", 2,
                                  labbook=book))
        child.until(lambda: lines_in(folder / "metrics.jsonl") >= 2)
        with open(disk / "filler", "wb", buffering=0) as f:
            try:
                while True:
                    f.write(bytes(4096))
            except OSError:
                pass
        got = child.wait()
        refused(got, "the disk is full", "of 0.01 GiB are free", str(disk), "lower --keep 2 to 1", code=1)
        os.unlink(disk / "filler")
        model = load_model(folder / "checkpoint")
        assert all(torch.isfinite(p).all() for p in model.parameters())
        found, problems = common.read_labbook(book)
        assert found[0]["kind"] == "start" and not problems
        step = torch.load(folder / "checkpoint" / "resume.pt", weights_only=True)["step"]
        succeed("train_grpo.py", "--resume", folder, "--labbook", book, "--max-steps", step + 2)
        assert [r["step"] for r in metrics(folder)] == list(range(1, step + 3))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_files_end_with_whole_lines(guesser, tasks, tmp_path):
    succeed(*grpo_flags(tmp_path / "run", guesser, tasks, "--max-steps", 1))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert Path(tmp_path / "run" / name).read_bytes().endswith(b"}\n")
    assert all(r["ids"][-1] == EOS or r["finish"] == "length" for r in jsonl(tmp_path / "run" / "samples.jsonl"))


# ----------------------------------------------------------------------------------------------------------------------
# What a person at a terminal sees

def test_a_terminal_sees_a_bar_and_a_file_sees_lines(guesser, tasks, tmp_path):
    pty = pytest.importorskip("pty", reason="needs Linux")
    shown = ("reward", "no_spread", "truncated", "length", "entropy", "tokens_per_s")
    plain = succeed(*grpo_flags(tmp_path / "plain", guesser, tasks, "--max-steps", 2)).stdout
    lines = [line for line in plain.split("\n") if line.startswith("step ")]
    assert len(lines) == 2 and all(word in lines[1] for word in shown)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 240, 0, 0))   # a new one has no width at all
    command = grpo_flags(tmp_path / "bar", guesser, tasks, "--max-steps", 4, "--updates-per-rollout", 2)
    child = subprocess.Popen([sys.executable, ROOT / command[0], *map(str, command[1:])], stdout=slave, stderr=slave,
                             cwd=ROOT, env=script_env())
    os.close(slave)
    seen = b""
    try:
        while block := os.read(master, 65536):
            seen += block
    except OSError:   # Linux says so when the last writer has gone
        pass
    os.close(master)
    text = seen.decode(errors="replace")
    assert child.wait() == 0, text[-2000:]
    assert "4/4" in text and "step 2/4" not in text and all(word in text for word in shown), text[-2000:]


# ----------------------------------------------------------------------------------------------------------------------
# The test command

@pytest.mark.slow
def test_the_test_command_explains_a_failure_and_fails_for_an_odd_skip(tmp_path):
    def command(text):
        (tmp_path / "test_some.py").write_text(f"import pytest\n\n\ndef test_some():\n    {text}\n")
        return run_script("test_smoke.py", tmp_path / "test_some.py", "--workers", 1)

    failed = command("assert [1, 2, 3] == [1, 2, 4]")
    assert failed.returncode == 1 and "At index 2 diff: 3 != 4" in failed.stdout and "1 failed" in failed.stdout
    skipped = command("pytest.skip('a Monday')")
    assert skipped.returncode == 1 and "a Monday" in skipped.stdout
    assert command("pytest.skip('needs CUDA')").returncode == 0
