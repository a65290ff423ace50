"""
Every script and arm on the GPU, as a user starts it but in this process: a GPU takes seconds to be woken, and is awake.
"""
import contextlib
import importlib.util
import io
import json
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import ROOT
from launch import jsonl, run

import common
from test_smoke import arm_commands, arm_flags, small  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def run_here(script, *args):
    """-> exit code and what was printed."""
    before = sys.argv, sys.excepthook, {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM,
                                                                                signal.SIGHUP)}
    out = io.StringIO()
    sys.argv = [str(ROOT / script), *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
            raise SystemExit(0)   # a script that ends without a code
    finally:
        sys.argv, sys.excepthook = before[:2]
        for number, handler in before[2].items():
            signal.signal(number, handler)
    return end.value.code or 0, out.getvalue()


@pytest.mark.parametrize("name, arm", list(arm_commands()))
def test_every_script_and_arm_runs_on_the_gpu(name, arm, small, tmp_path):  # noqa: F811
    code, said = run_here(f"{name}.py", *arm_flags(name, arm, small), "--device", "cuda", "--output-dir",
                          tmp_path / "run", "--labbook", tmp_path / "labbook.md")
    assert code == 0 and "products in bfloat16" in said
    record = common.read_labbook(tmp_path / "labbook.md")[0][1]
    assert record["kind"] == "run" and record["status"] == "ok"
    assert record["device"] == torch.cuda.get_device_name(0) and record["budget"]["peak_mem_gib"] > 0
    assert [r["step"] for r in jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_evaluation_and_the_pool_on_the_gpu(small, tmp_path):  # noqa: F811
    out = tmp_path / "out.json"
    code, _ = run_here("eval_passk.py", "--model", small / "model", "--tasks-dir", small / "tasks", "--n", 8, "--k", 1,
                       "--max-new", 8, "--limit", 8, "--device", "cuda", "--out", out)
    assert code == 0 and len(json.loads(out.read_text())["problems"]) == 8


@pytest.mark.parametrize("optim", ["adamw", "adamw-sr", pytest.param("adamw8bit", marks=pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs package bitsandbytes"))])
@pytest.mark.parametrize("there, back", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_moves_between_cpu_and_gpu(there, back, optim, small, tmp_path):  # noqa: F811
    flags = [*arm_flags("train_grpo", "grpo", small), "--output-dir", tmp_path / "run", "--labbook",
             tmp_path / "labbook.md", "--optim", optim]
    assert run_here("train_grpo.py", *flags, "--device", there)[0] == 0
    code, said = run_here("train_grpo.py", "--resume", tmp_path / "run", "--device", back, "--max-steps", 4)
    assert code == 0 and [r["step"] for r in jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4], said


def test_a_run_that_is_killed_on_the_gpu_goes_on(small, tmp_path):  # noqa: F811
    folder, book = tmp_path / "run", tmp_path / "labbook.md"
    flags = [*arm_flags("train_grpo", "grpo", small), "--max-steps", 200, "--save-every", 2, "--device", "cuda",
             "--output-dir", folder, "--labbook", book]
    child = subprocess.Popen([sys.executable, str(ROOT / "train_grpo.py"), *map(str, flags)])
    rows = folder / "metrics.jsonl"
    while not ((folder / "checkpoint").exists() and rows.exists() and rows.read_bytes().count(b"\n") >= 3):
        assert child.poll() is None
        time.sleep(0.02)
    child.kill()
    assert child.wait() == -signal.SIGKILL and not (folder / "final.json").exists()
    assert run_here("train_grpo.py", "--resume", folder, "--labbook", book)[0] == 0
    assert [r["step"] for r in jsonl(rows)] == list(range(1, 201))


@pytest.mark.parametrize("script", ["train_grpo", "train_sft"])
def test_memory_that_runs_out_is_one_line_and_a_record(script, small, tmp_path):  # noqa: F811
    """Something else takes all that is left of the GPU once the run is under way: CUDA's own error, not one of ours."""
    copy = tmp_path / f"{script}.py"
    copy.write_text(f"""import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import common, torch
held, pack_rows = [], common.pack_rows
def take_all_and_pack(*args):
    size = torch.cuda.mem_get_info()[0]
    while size >= 512:   # to the last gap of what the allocator keeps
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return pack_rows(*args)
common.pack_rows = take_all_and_pack
runpy.run_path({str(ROOT / script)!r} + ".py", run_name="__main__")
""")
    arm = "grpo" if script == "train_grpo" else None
    got = run(copy, *arm_flags(script, arm, small), "--device", "cuda", "--output-dir", tmp_path / "run", "--labbook",
              tmp_path / "labbook.md")
    assert got.returncode == 1 and len(got.stderr.splitlines()) == 1, got.stderr[-2000:]
    assert re.search(r"out of memory: asked for [\d.]+ \w+, ([\d.]+) GiB in use of \1; "
                     r"lower --micro-batch-tokens \d+ \(\d+ would fit\)", got.stderr), got.stderr
    last = common.read_labbook(tmp_path / "labbook.md")[0][-1]
    assert (last["kind"], last["status"]) == ("run", "failed") and "out of memory" in last["notes"]
