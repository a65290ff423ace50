"""
runs/six_arms.sh and runs/reality_check.sh with a `python` that only writes down how it was called and leaves the files
that the real scripts leave: what is run, with which words, what a second start does, what a failure does.
"""
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from helpers import ROOT

FAKE = """#!{python} -IS
import json, os, signal, socket, sys
args = sys.argv[1:]
if args[0] == "-c":
    os.execv(sys.executable, [sys.executable, *args])
with open(os.environ["CALLS"], "a") as f:
    f.write(json.dumps(args) + "\\n")
after = lambda flag: args[args.index(flag) + 1] if flag in args else None
def put(path, text=""):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
script = args[0]
if script.endswith("serve.py"):
    if os.environ.get("FAIL") == "serve":
        sys.exit("serve.py: error: no model there")
    with socket.create_server(("127.0.0.1", int(after("--port")))):
        put("serving", str(os.getpid()))
        signal.pause()
elif script == "data/distil/prepare.py":
    for name in ("train.jsonl", "valid.jsonl"):
        put(after("--output-dir") + "/" + name)
    put(after("--output-dir") + "/prepared.json", json.dumps({{"scores": {{"ended": os.environ["ENDED"]}}}}, indent=1))
elif script == "data/arithmetic/prepare.py":
    put(after("--output-dir") + "/heldout-wording.jsonl")
elif script == "eval_passk.py":
    put(after("--out") or after("--pool-out") + ".meta.json")
elif script.startswith(("train", "pretrain")):
    folder = after("--resume") or after("--output-dir")
    put(folder + "/config.json")
    put(folder + "/checkpoint/config.json")
    if os.environ.get("FAIL") and folder.endswith(os.environ["FAIL"]):
        sys.exit(script + ": error: the disk is full")
    put(folder + "/final.json", json.dumps({{"status": "ok", "budget": {{"wall_s": 10.0}},
                                            "config": {{"max_steps": int(after("--max-steps") or 81)}},
                                            "losses": {{"valid": abs(float(after("--lr") or 0) - 3e-4)}}}}, indent=1))
    print("done")
"""


@pytest.fixture
def lab(tmp_path):
    """A project folder that holds the two scripts alone -> start(script, *stages, **environment), and calls()."""
    top, bin_ = tmp_path / "lab", tmp_path / "bin"
    (top / "data" / "tiny" / "work").mkdir(parents=True)
    (top / "data" / "tiny" / "work" / "pretrain.jsonl").touch()
    (top / "runs").mkdir()
    for name in ("six_arms.sh", "reality_check.sh", "study.sh"):
        shutil.copy(ROOT / "runs" / name, top / "runs" / name)
    bin_.mkdir()
    (bin_ / "python").write_text(FAKE.format(python=sys.executable))
    (bin_ / "python").chmod(0o755)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path / "calls"

    class Lab:
        def __init__(self):
            self.folder, self.port = top, port

        def start(self, script, *stages, **env):
            log.write_text("")
            mine = {"PATH": f"{bin_}:{os.environ['PATH']}", "CALLS": str(log), "ENDED": "budget", "PORT": str(port)}
            return subprocess.run(["bash", f"runs/{script}", *stages], cwd=top, capture_output=True, text=True,
                                  timeout=100, env={**mine, **env})   # no LABBOOK or OUT of whoever runs the tests

        def calls(self, script=""):
            return [c for c in map(json.loads, log.read_text().split("\n")[:-1]) if c[0].startswith(script)]
    return Lab()


def value(call, flag):
    return call[call.index(flag) + 1] if flag in call else None


def test_the_reality_check_from_start_to_end_and_again(lab):
    spaces = {"OUT": "runs/my reality", "MODEL": "my model", "LABBOOK": "lab book.md"}
    got = lab.start("reality_check.sh", **spaces)
    assert got.returncode == 0 and got.stderr == "", got.stderr
    trained = {value(c, "--output-dir"): c for c in lab.calls("train")}
    names = [f"{v}-s{s}" for v in ("lora", "full") for s in (0, 1, 2)] + ["sft-lora", "sft-full"]
    names += [f"tune-sft-{v}-{lr}" for v in ("lora", "full") for lr in ("1e-4", "3e-4", "1e-3")]
    assert set(trained) == {f"runs/my reality/{n}" for n in names}
    for folder, call in trained.items():
        assert value(call, "--model") == "my model" and value(call, "--labbook") == "lab book.md"
        assert value(call, "--lora-rank") == ("16" if "lora" in folder.rpartition("/")[2] else None)
        assert value(call, "--seed") == ("100" if "tune" in folder else folder[-1] if "-s" in folder[-3:] else None)
    best = trained["runs/my reality/sft-full"]   # the rate of the lowest validation loss
    assert value(best, "--lr") == "3e-4" and value(best, "--data") == "runs/my reality/distil/train.jsonl"
    assert value(trained["runs/my reality/lora-s0"], "--predict") == "heldout-same.pass@1 >= 0.5"
    assert value(lab.calls("data/distil/prepare.py")[0], "--budget-seconds") == "7.0"
    with pytest.raises(ProcessLookupError):   # the teacher's server is gone
        os.kill(int((lab.folder / "serving").read_text()), 0)
    reported = lab.calls("report.py")[-1]
    assert set(reported[reported.index("--runs") + 1:]) == {f"runs/my reality/{n}" for n in names if "tune" not in n}
    (lab.folder / "lab book.md").write_text("".join(value(c, "--register-margin") + "\n" for c in lab.calls("report.py")
                                                    if "--register-margin" in c))
    assert lab.start("reality_check.sh", **spaces).returncode == 0
    assert [c[0] for c in lab.calls()] == ["report.py"]   # nothing is run twice


def test_an_asking_that_was_cut_short_goes_on_and_a_half_trained_teacher_too(lab):
    assert lab.start("reality_check.sh", "grpo", "teacher").returncode == 0
    (lab.folder / "runs/reality/teacher/final.json").unlink()   # killed behind a checkpoint
    assert lab.start("reality_check.sh", "teacher", "distil", ENDED="SIGTERM").returncode == 0
    call, = lab.calls("pretrain.py")
    assert call[1:] == ["--resume", "runs/reality/teacher", "--max-steps", "1200", "--labbook", "labbook.md"]
    assert lab.start("reality_check.sh", "distil").returncode == 0
    assert len(lab.calls("data/distil/prepare.py")) == 1
    assert lab.start("reality_check.sh", "distil").returncode == 0
    assert lab.calls() == []


def test_a_teacher_that_cannot_be_served_is_said(lab):
    assert lab.start("reality_check.sh", "grpo").returncode == 0
    got = lab.start("reality_check.sh", "distil", FAIL="serve", TEACHER="nowhere")
    assert got.returncode == 1 and got.stderr == "serve.py: error: no model there\n"
    assert not lab.calls("data/distil/prepare.py") and not lab.calls("train_sft.py")
    with socket.create_server(("127.0.0.1", lab.port)):   # whoever that is, it is not asked
        got = lab.start("reality_check.sh", "distil")
    assert got.returncode == 1 and f"port {lab.port} is in use" in got.stderr and not lab.calls("data/distil")
    got = lab.start("reality_check.sh", "distil", OUT="runs/empty")
    assert got.returncode == 2 and "the stage grpo first" in got.stderr
    got = lab.start("reality_check.sh", "report", OUT="runs/empty")
    assert got.returncode == 2 and "no run in runs/empty yet" in got.stderr


@pytest.mark.parametrize("script, out, failing", [("reality_check.sh", "runs/reality", "lora-s1"),
                                                  ("six_arms.sh", "runs/six arms", "six arms-opd-s0")])
def test_a_run_that_fails_is_said_the_others_run_and_a_second_start_goes_on(script, out, failing, lab):
    stages = ["grpo"] if script == "reality_check.sh" else ["0"]
    got = lab.start(script, *stages, OUT=out, MODEL="my model", FAIL=failing)
    assert got.returncode == 123 and got.stderr.startswith("train_") and "the disk is full" in got.stderr
    first = lab.calls("train")
    assert len(first) == {"reality_check.sh": 6, "six_arms.sh": 12}[script]
    assert all(value(c, "--model") == "my model" for c in first)
    if script == "reality_check.sh":   # it stays a row of the report
        lab.start(script, "report")
        assert f"{out}/{failing}" in lab.calls("report.py")[0]
    assert lab.start(script, *stages, OUT=out, MODEL="my model").returncode == 0
    assert [(value(c, "--resume"), len(c)) for c in lab.calls()] == [(f"{out}/{failing}", 7)]
    assert lab.start(script, *stages, OUT=out, MODEL="my model", STEPS="300").returncode == 0   # done, but for fewer
    assert {value(c, "--resume") for c in lab.calls()} == {value(c, "--output-dir") for c in first}
    assert {value(c, "--max-steps") for c in lab.calls()} == {"300"}
    assert lab.start(script, *stages, OUT=out, MODEL="my model", STEPS="300").returncode == 0 and lab.calls() == []


def test_six_arms_give_every_run_the_same_budget_and_pool(lab):
    assert lab.start("six_arms.sh", "5", OUT="runs/six arms", MORE="--slots 8").returncode == 0
    calls = lab.calls("train")
    others = ("grpo", "rft_shortest", "rft_shortest_braked", "rft_random", "opd", "dr_grpo", "random_reward",
              "permuted_reward", "format_only")
    assert {(value(c, "--arm"), value(c, "--lam"), value(c, "--lr")) for c in calls} == {
        ("grpo_length_penalty", "0.2", "3e-5"), ("grpo_length_penalty", "0.5", "3e-5"), ("grpo", None, "0"),
        *((arm, None, "3e-5") for arm in others)}
    assert len(calls) == 12
    method = ("--arm", "--lam", "--lr", "--output-dir")
    same = {json.dumps([w for i, w in enumerate(c) if i and w not in method and c[i - 1] not in method]) for c in calls}
    assert len(same) == 1   # pool, steps, rollouts, evaluation and seed are word for word the same
    call = json.loads(same.pop())
    assert value(call, "--pool") == "runs/six arms/pool.jsonl" and value(call, "--slots") == "8"
    assert value(call, "--seed") == "5" and value(call, "--tasks-dir") == "runs/six arms/tasks"


@pytest.mark.parametrize("script, stages, word", [
    ("reality_check.sh", ["margin", "grop"], "no stage grop"), ("reality_check.sh", ["--help"], "no stage --help"),
    ("six_arms.sh", ["--help"], "seed '--help'"), ("six_arms.sh", ["0", "x"], "seed 'x'"),
    ("six_arms.sh", [" "], "seed ' '")])
def test_a_mistake_is_refused_before_anything_is_run_or_written(script, stages, word, lab):
    got = lab.start(script, *stages, OUT="runs/out")
    assert got.returncode == 2 and word in got.stderr and len(got.stderr.splitlines()) == 1
    assert lab.calls() == [] and not (lab.folder / "runs/out").exists()


@pytest.mark.parametrize("name, text", [
    ("OUT", "runs/it's"), ("MODEL", 'a "b"'), ("LABBOOK", "a\\b"), ("DEVICE", "cuda\ncpu"), ("PRICE", '"'),
    ("STEPS", "1 --arm dr_grpo"), ("STEPS", "0100"), ("GPUS", "x")])
@pytest.mark.parametrize("script", ["reality_check.sh", "six_arms.sh"])
def test_settings_that_a_line_of_the_study_cannot_hold_are_refused(script, name, text, lab):
    got = lab.start(script, **{name: text})
    assert got.returncode == 2 and text.split("\n")[0] in got.stderr and lab.calls() == []


@pytest.mark.parametrize("name, text", [("SEEDS", " "), ("SEEDS", "*"), ("TUNE_LORA", " "), ("TUNE_SFT", " "),
                                        ("VARIANTS", " "), ("VARIANTS", "LoRA")])
def test_a_blank_list_clears_nothing_away(name, text, lab):
    (lab.folder / "runs/reality").mkdir()
    (lab.folder / "runs/reality/precious").touch()
    got = lab.start("reality_check.sh", "tune", "grpo", **{name: text})
    assert got.returncode == 2 and len(got.stderr.splitlines()) == 1 and lab.calls() == []
    assert (lab.folder / "runs/reality/precious").exists()


@pytest.mark.skipif(not shutil.which("flock"), reason="needs Linux")
@pytest.mark.parametrize("script", ["reality_check.sh", "six_arms.sh"])
def test_a_second_start_at_once_is_refused(script, lab):
    import fcntl
    (lab.folder / "runs/out").mkdir()
    with open(lab.folder / "runs/out/.lock", "w") as held:   # as the first start holds it
        fcntl.flock(held, fcntl.LOCK_EX)
        got = lab.start(script, OUT="runs/out")
    assert got.returncode == 2 and "is in use by another start" in got.stderr and lab.calls() == []
