"""
bench.py: its limits against hand-worked figures, the three ways to cut a batch, and what it does where a rival is
missing or fails. Its figures themselves are no business of a test.
"""
import argparse
import runpy
import signal
import statistics
import sys

import helpers
import pytest
import torch

import bench
import common
from engine import Engine
from model import Config, Transformer


def run_here(name, words, monkeypatch):
    """A script inside this process; what it sets for a whole process (hook, signals) is put back."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    try:
        runpy.run_path(str(helpers.ROOT / name), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)


H200 = bench.Machine(torch.device("cpu"), torch.bfloat16, 0.0, copy=4.3e12, product=790e12)


def sized(name):
    config = Config.from_dict(bench.SHAPES[name])
    with torch.device("meta"):
        return config, Transformer(config).num_params()


# ----------------------------------------------------------------------------------------------------------------------
# Limits

@pytest.mark.parametrize("name, millions", [("135m", 134.5), ("0.5b", 494.0), ("1.5b", 1543.7), ("4.7m", 4.7)])
def test_shapes_have_the_published_sizes(name, millions):
    assert sized(name)[1] / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name, rows, context, thousands", [
    ("135m", 64, 512, 262), ("135m", 512, 1024, 169), ("0.5b", 256, 512, 334), ("1.5b", 64, 1024, 55),
    ("1.5b", 256, 512, 131)])
def test_the_floor_of_a_decode_step(name, rows, context, thousands):
    assert bench.decode_floor(*sized(name), rows, context, H200) / 1e3 == pytest.approx(thousands, rel=0.02)


@pytest.mark.parametrize("name, tera", [("135m", 26.4 + 2.0), ("0.5b", 97.1 + 2.5), ("1.5b", 303.5 + 5.1)])
def test_the_arithmetic_of_a_learning_step(name, tera):
    assert bench.learn_flops(*sized(name), [512] * 64, 64 * 512) / 1e12 == pytest.approx(tera, rel=0.01)


# ----------------------------------------------------------------------------------------------------------------------
# Memory: row A12

def test_three_ways_to_cut_a_batch_have_one_gradient_and_the_right_memory():
    model = helpers.tiny_model(scale=3.0)
    ids, length = torch.randint(5, 200, (16, 40)), torch.full((16,), 40)
    mask = (torch.arange(40) >= 10).expand(16, -1)
    loss, grad, kept = {}, {}, {}
    for way in bench.WAYS:
        model.zero_grad()
        with bench.Kept(model) as k:
            loss[way] = bench.cut(model, ids, mask, length, way)
        assert k.now == 0   # all of it was given back
        grad[way] = torch.cat([p.grad.flatten() for p in model.parameters()])
        kept[way] = k.most
    whole, once, each, chunked, again = bench.WAYS
    for way in bench.WAYS:
        assert loss[way] == pytest.approx(loss[whole], abs=1e-6)
        assert torch.allclose(grad[way], grad[whole], atol=1e-6) and grad[way].norm() > 1e-3
    assert kept[once] == pytest.approx(kept[whole], rel=0.05)   # pieces alone save nothing
    assert kept[each] < kept[whole] / 6                         # of 8 pieces, one at a time
    assert kept[chunked] < kept[each]


# ----------------------------------------------------------------------------------------------------------------------
# The GRPO step

def test_sampler_and_trainer_are_compared_in_both_precisions(tmp_path, capsys):
    helpers.tiny_folder(tmp_path / "model", scale=4)
    args = argparse.Namespace(shape=str(tmp_path / "model"), rows=[8], num_generations=4, prompt=8)
    table = bench.Table()
    bench.agreement(args, bench.Machine(torch.device("cpu"), torch.bfloat16, 0.0), table, new=12)
    figures = {line["case"]: line for line in table.lines}
    assert len(figures) == 8
    for case, line in figures.items():
        if "scored again" in case:
            assert line["value"] == "bit-equal"
        else:   # bf16 rounds: a difference of 0 would mean that one was compared with itself
            assert 0 < line["value"] < (1e-5 if "float32" in case else 0.05), case
            assert abs(float(line["note"].split()[-1]) - 1) < (1e-5 if "float32" in case else 0.02)


def test_the_timed_step_is_a_step():
    model = helpers.tiny_model(scale=3.0)
    optimizer, engine = common.make_optimizer(model, 1e-3), Engine(model, slots=16)
    r = engine.generate([[5, 6, 7], [8, 9, 10]], 8, max_new=12, eos_ids=())
    start = [p.detach().clone() for p in model.parameters()]
    sums = bench.learn(model, optimizer, r, 8, 64)
    assert int(sums["tokens"]) == 16 * 12                        # no row was without an advantage
    assert sums["mismatch"] / sums["tokens"] < 1e-4
    assert all(not torch.equal(a, b) for a, b in zip(start, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# Rivals

@pytest.fixture
def race(tmp_path, capsys):
    """race(makers) with two rounds of 8 rows -> the table's lines and the rates."""
    (tmp_path / "config.json").write_text(bench.json.dumps(bench.SHAPES["4.7m"]))
    args = argparse.Namespace(rows=[8], prompt=4, new=8, num_generations=8, repeats=2, shape="4.7m")

    def go(makers):
        table = bench.Table()
        rates = bench.race(args, bench.Machine(torch.device("cpu"), torch.float32, 1.0, 1e10, 1e10), table, tmp_path,
                           makers)
        return table.lines, rates
    return go


def contestant(calls, name, result=64, fails_at=None):
    def make(args, m, folder):
        def go(prompts, seed):
            calls.append((name, seed, prompts))
            if fails_at == seed:
                raise RuntimeError("no kernel image\nfor this device")
            return result
        return go
    return make


def test_rounds_are_interleaved_with_the_same_fresh_prompts(race):
    calls = []
    lines, rates = race({"ours": contestant(calls, "ours"), "other": contestant(calls, "other")})
    assert [c[:2] for c in calls] == [("ours", 0), ("other", 0), ("ours", 1), ("other", 1), ("ours", 2), ("other", 2)]
    assert calls[0][2] == calls[1][2] and calls[0][2] != calls[2][2] and len(calls[0][2]) == 1
    assert [x["who"] for x in lines if x["unit"] == "tok/s"] == ["ours", "other"] and rates[8] > 0
    assert [x["value"] > 1.0 for x in lines if x["case"].startswith("start")] == [True, True]   # with ready_s


@pytest.mark.parametrize("bad, said", [(dict(fails_at=1), "RuntimeError: no kernel image for this device"),
                                       (dict(fails_at=0), "RuntimeError: no kernel image for this device"),
                                       (dict(result=60), "RunError: sampled 60 tokens, not 64")])
def test_a_rival_that_fails_or_does_less_work_is_said_and_the_rest_goes_on(race, bad, said):
    lines, rates = race({"ours": contestant([], "ours"), "bad": contestant([], "bad", **bad)})
    assert [x["note"] for x in lines if x["who"] == "bad" and x["value"] == "failed"] == [said]
    assert not [x for x in lines if x["who"] == "bad" and x["unit"] == "tok/s"] and rates[8] > 0


def test_our_own_failure_is_not_hidden(race):
    with pytest.raises(RuntimeError):
        race({"ours": contestant([], "ours", fails_at=1)})


@pytest.mark.parametrize("words, said", [
    (["train", "--against", "vllm"], "--against vllm is not measured by train, which knows ['trl']"),
    (["rollout", "--rows", "60"], "--rows 60 must be a multiple of --num-generations 8"),
    (["train", "--rows", "64", "128"], "--rows 64 128: train takes one number"),
    (["rollout", "--optim", "adamw-sr"], "--optim is not read by rollout"),
    (["cpu", "--device", "cuda"], "--device is not read by cpu"),
    (["memory", "--rows", "8"], "--rows is not read by memory"),
    (["sandbox", "--shape", "135m"], "--shape is not read by sandbox"),
    (["speed"], "invalid choice: 'speed'")])
def test_wrong_words_are_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as e:
        bench.get_args(words)
    assert e.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["--shape", "9b"], "--shape 9b: neither one of 4.7m"),
    (["--shape", "{empty}"], "no config.json"),
    (["--prompt", "4000"], "--prompt 4000 and --new 256 are 4256 tokens, and the context of --shape 135m is 4096: "
                           "lower --new to 96 or less")])
def test_a_shape_that_cannot_be_is_said_before_anything_is_measured(words, said, tmp_path, monkeypatch):
    words = [w.format(empty=tmp_path) for w in words]
    monkeypatch.setattr(bench.common, "pick_device", None)   # what is measured starts here
    with pytest.raises(common.UserError) as e:
        run_here("bench.py", ["rollout", *words, "--labbook", tmp_path / "book.md"], monkeypatch)
    assert said in str(e.value) and not (tmp_path / "book.md").exists()


def test_the_command_writes_one_record_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    folder, book = helpers.tiny_folder(tmp_path / "model"), tmp_path / "book.md"
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):   # it sets them; put back after
        monkeypatch.setenv(name, "")
    words = ["rollout", "--shape", folder, "--rows", 8, 16, "--prompt", 4, "--new", 8, "--repeats", 1, "--against",
             "vllm", "--labbook", book, "--notes", "a test"]
    run_here("bench.py", words, monkeypatch)
    out = capsys.readouterr().out
    records, problems = common.read_labbook(book)
    assert not problems and len(records) == 1
    r = records[0]
    assert (r["kind"], r["script"], r["arm"], r["status"], r["notes"]) == ("bench", "bench", "rollout", "ok", "a test")
    assert set(r) >= {"prev", "run_id", "parent", "time", "task", "model", "data", "seed", "config", "budget", "losses",
                      "scores", "git", "versions", "device"}
    lines = r["scores"]["lines"]
    assert [x["case"] for x in lines if x["unit"] == "tok/s"] == [f"{folder}, {n} rows" for n in (8, 16)]
    assert all(0 < x["share"] for x in lines if x["unit"] == "tok/s")
    assert [x["value"] > 0 for x in lines if x["case"] == "limit of the machine"] == [True, True]
    assert any(x["case"].startswith("skewed") and x["value"] > 0 for x in lines)
    if r["versions"]["vllm"] is None:
        assert "| rollout | vLLM | not installed" in out
    assert f"torch {torch.__version__}" in out and "vllm" in r["versions"]


@pytest.mark.slow
def test_against_transformers_and_trl_on_a_cpu(tmp_path):
    pytest.importorskip("trl", reason="needs package trl")
    book = tmp_path / "book.md"
    done = helpers.run_script("bench.py", "cpu", "--rows", 8, "--prompt", 4, "--new", 8, "--repeats", 2, "--labbook",
                              book, timeout=400)
    assert done.returncode == 0, done.stderr
    lines = common.read_labbook(book)[0][0]["scores"]["lines"]
    by_who = {}
    for x in lines:
        by_who.setdefault(x["who"], []).append(x["value"])
    for who in ("HF generate", "HF generate, static cache", "TRL, HF generate"):
        assert statistics.median(by_who[who]) > 0, lines
