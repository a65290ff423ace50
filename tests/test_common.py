"""
common.py: records that survive kills and show edits, flags, packing and the chunked head against plain autograd, the
reading of numbers (one long table), pass@k against enumeration, intervals by simulation.
"""
import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import DATA, EOS, ROOT, problem, read_rows, script_env, tiny_folder, tiny_model, tiny_tokenizer, write_rows
from tokenizers import processors
from transformers import AutoModelForCausalLM

import common
import envs
from common import UserError
from model import new_model, save_model
from train_sft import as_batch, sft_loss

torch.set_num_threads(1)


# ----------------------------------------------------------------------------------------------------------------------
# Labbook

def record(i, **more):
    return {"kind": "run", "run_id": f"r{i}", "scores": {"x": i}, **more}


def lines_of(book):
    return book.read_text(encoding="utf-8").split("\n")


def test_labbook_is_a_chain_that_a_person_can_read(tmp_path):
    book, last = tmp_path / "labbook.md", ""
    for i in range(3):
        got = common.append_record(book, record(i, notes="a\u2028b\x85c \u00e9 {"), f"- run\n{i}")
        assert got["prev"] == ("" if i == 0 else common.record_hash(last)) and list(got)[:2] == ["kind", "prev"]
        last = [line for line in lines_of(book) if line.startswith("{")][-1]
        assert json.loads(last) == got
    records, problems = common.read_labbook(book)
    assert problems == [] and [r["run_id"] for r in records] == ["r0", "r1", "r2"]
    text = lines_of(book)
    assert text[0].startswith("# ") and "- run 1" in text   # prose of one line, above its record
    assert text[text.index("- run 1") + 1] == [line for line in text if line.startswith("{")][1]


def test_an_edit_and_a_removal_show(tmp_path):
    book = tmp_path / "labbook.md"
    for i in range(4):
        common.append_record(book, record(i), f"- run {i}")
    whole = book.read_text()
    book.write_text(whole.replace('"x": 1', '"x": 7'))
    records, problems = common.read_labbook(book)
    assert len(records) == 4 and len(problems) == 1 and "edited" in problems[0] and records[2]["run_id"] == "r2"
    lines = whole.split("\n")
    at = [i for i, line in enumerate(lines) if line.startswith("{")]
    book.write_text("\n".join(line for i, line in enumerate(lines) if i != at[1]))
    records, problems = common.read_labbook(book)
    assert len(records) == 3 and len(problems) == 1 and f":{at[2]}:" in problems[0]
    book.write_text("\n".join(line for i, line in enumerate(lines) if i != at[0]))   # the first one counts too
    assert len(common.read_labbook(book)[1]) == 1
    lines[at[1]], lines[at[2]] = lines[at[2]], lines[at[1]]
    book.write_text("\n".join(lines))
    assert len(common.read_labbook(book)[1]) == 3
    prose = whole.replace("- run 2", "- run 2, which went well")   # prose is a person's to edit
    book.write_text(prose)
    assert common.read_labbook(book)[1] == []


def test_a_torn_tail_is_cut_and_the_chain_goes_on(tmp_path):
    book = tmp_path / "labbook.md"
    for i in range(2):
        common.append_record(book, record(i, inner={"a": {}}), f"- run {i}")
    whole = book.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for cut in range(start + 1, len(whole)):   # the second record breaks off at every byte
        book.write_bytes(whole[:cut])
        common.append_record(book, record(2), "- run 2")
        records, problems = common.read_labbook(book)
        # a record that lacks nothing but its newline is one
        assert [r["run_id"] for r in records] == (["r0", "r2"] if cut < len(whole) - 1 else ["r0", "r1", "r2"])
        assert problems == []


def test_the_last_line_of_a_person_stays(tmp_path):
    book = tmp_path / "labbook.md"
    common.append_record(book, record(0), "- run 0")
    with open(book, "a") as f:
        f.write("My thought about it, without a newline")
    common.append_record(book, record(1), "- run 1")
    assert "My thought about it, without a newline" in lines_of(book)
    assert common.read_labbook(book)[1] == [] and len(common.read_labbook(book)[0]) == 2


def test_a_broken_line_is_reported_and_does_not_hide_the_rest(tmp_path):
    book = tmp_path / "labbook.md"
    for i in range(3):
        common.append_record(book, record(i), "")
    book.write_text(book.read_text().replace('"run_id": "r1"', '"run_id": "r1'))
    records, problems = common.read_labbook(book)
    assert [r["run_id"] for r in records] == ["r0", "r2"] and "not a whole record" in problems[0]


@pytest.mark.parametrize("place", ["no/such/folder/labbook.md", "."])
def test_a_labbook_that_cannot_be_written_is_one_line(tmp_path, place):
    for fn in (lambda p: common.append_record(p, record(0), ""), common.check_writable):
        with pytest.raises(UserError, match="--labbook .*cannot be written"):
            fn(tmp_path / place)


def test_a_record_is_strict_json(tmp_path):
    with pytest.raises(ValueError):
        common.append_record(tmp_path / "labbook.md", record(0, loss=float("nan")), "")
    assert common.read_labbook(tmp_path / "labbook.md") == ([], [])   # and nothing of it was written
    assert common.finite({"a": [1.0, float("inf"), (float("nan"), "x")]}) == {"a": [1.0, None, [None, "x"]]}


def test_eight_processes_append_while_one_is_killed(tmp_path):
    book = tmp_path / "labbook.md"
    fork = multiprocessing.get_context("fork")

    def append(name, count):
        for i in range(count):
            common.append_record(book, {"kind": "run", "run_id": f"{name}-{i}", "notes": "x" * 3000}, "- run")

    def start(name, count):
        process = fork.Process(target=append, args=(name, count), daemon=True)
        process.start()
        return process

    others, rng = [start(f"p{i}", 25) for i in range(7)], random.Random(0)
    for i in range(12):
        victim = start(f"victim{i}", 10 ** 6)
        time.sleep(rng.uniform(0.01, 0.1))
        victim.kill()   # SIGKILL
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
    for p in others:
        p.join(60)
        assert p.exitcode == 0
    common.append_record(book, record(0), "")   # cuts the tail that the last kill may have torn
    records, problems = common.read_labbook(book)
    assert problems == []
    assert sum(line.startswith("{") for line in lines_of(book)) == len(records)
    for i in range(7):
        assert [r["run_id"] for r in records if r["run_id"].startswith(f"p{i}-")] == [f"p{i}-{j}" for j in range(25)]
    assert any(r["run_id"].startswith("victim") for r in records)


# ----------------------------------------------------------------------------------------------------------------------
# Flags

@pytest.mark.parametrize("parse, good, bad", [
    (common.number(), ["1", "-2.5", "1e3", "0"], ["nan", "inf", "-inf", "1e999", "x", "", "1,5"]),
    (common.number(int, 1), ["1", "64"], ["0", "-1", "1.5", "1e3", "nan", "", "x"]),
    (common.number(int, 0), ["0"], ["-1"]),
    (common.number(float, 0, 1), ["0", "1", "0.5"], ["-0.01", "1.01", "nan"]),
    (common.number(float, above=0), ["1e-9"], ["0", "-0.0", "-1", "nan"]),
    (common.number(float, above=0, below=1), ["0.5"], ["0", "1", "inf"]),
])
def test_number_flags(parse, good, bad):
    for text in good:
        assert parse(text) == float(text)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as e:
            parse(text)
        assert text in str(e.value)   # the value seen


@pytest.mark.parametrize("digits", [19, 400])
def test_a_whole_number_that_no_tensor_and_no_float_holds_is_refused(digits):
    assert common.number(int)(str(2 ** 63 - 1)) == 2 ** 63 - 1
    with pytest.raises(argparse.ArgumentTypeError, match=r"^9{19,24}(\.\.\.)? is out of range .below 2\^63."):
        common.number(int, 0)("9" * digits)


def test_an_argument_that_is_not_utf8_is_refused(capsys):
    for parse in (common.Parser.parse_args, common.parse_args):
        for flag in ("--notes", "--resume"):
            with pytest.raises(SystemExit) as e:
                parse(run_parser(), [flag, os.fsdecode(b"caf\xe9")])
            assert e.value.code == 2 and "argument 2 is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("odd", [{"kind": "margin", "text": "a: b"}, {"kind": "margin", "time": "now"},
                                 {"kind": "prediction"}, {"kind": "run", "time": 5}, {"kind": "run", "scores": []},
                                 {"kind": "data", "data": [None]}, {"kind": "run", "run_id": 3}])
def test_a_record_of_other_types_is_named_and_left_out(odd, tmp_path):
    book = tmp_path / "labbook.md"
    for record in ({"kind": "run", "run_id": "a"}, odd, {"kind": "run", "run_id": "b"}):
        common.append_record(book, record, "-")
    records, problems = common.read_labbook(book)
    assert [r["run_id"] for r in records] == ["a", "b"]
    assert len(problems) == 1 and "left out, its " in problems[0]   # and the chain is whole behind it


def test_a_value_of_two_lines_makes_an_error_of_one(capsys):
    for words in (["--lr", "1\n2"], ["--no\nsuch"], ["--no\r\x1b[2J\u2028such"]):
        with pytest.raises(SystemExit):
            run_parser().parse_args(words)
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert common.one_line("a\nb\x1b\u2028c\u00e9") == "a\\nb\\x1b\\u2028c\u00e9"


def run_parser():
    p = common.Parser(prog="x.py")
    p.add_argument("--lr", type=common.number(float, above=0), default=None)
    p.add_argument("--max-steps", type=common.number(int, 1), default=10)
    p.add_argument("--num-generations", type=common.number(int, 1), default=4)
    p.add_argument("--preset", choices=["big", "small"], default=None)
    p.add_argument("--stop", nargs="*", default=[])
    p.add_argument("--task", default="arithmetic")
    p.add_argument("--model", default="some/model")
    common.add_run_flags(p, task=False)
    return p


PRESETS = {"big": {"lr": 1e-6, "num_generations": 16}, "small": {"lr": 1e-4}}


def test_a_preset_sets_defaults_and_what_is_typed_wins():
    def get(*argv):
        a = common.parse_args(run_parser(), argv, PRESETS)
        return a.lr, a.num_generations, a.preset
    assert get() == (None, 4, None)
    assert get("--preset", "big") == (1e-6, 16, "big")
    assert get("--preset=big", "--lr", "3e-4") == (3e-4, 16, "big")
    assert get("--num-generations", "4", "--preset", "big") == (1e-6, 4, "big")
    assert get("--preset", "small") == (1e-4, 4, "small")


def refused(capsys, *argv, parser=None):
    """The one line on stderr of a command that is refused with exit code 2."""
    with pytest.raises(SystemExit) as e:
        common.parse_args(parser or run_parser(), argv, PRESETS)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("argv, said", [
    (["--batch-size", "8"], "--prompts-per-step"), (["--batch-size=8"], "--num-generations"),
    (["--grad-accum", "4"], "--micro-batch-tokens"), (["--data-dir", "x"], "--tasks-dir"),
    (["--learning-rate", "1"], "--lr"), (["--rollouts", "vllm-colocate"], "vllm-colocate"),
    (["--max-st", "3"], "--max-st"), (["--nonsense"], "--nonsense"), (["--lr", "nan"], "nan"),
    (["--lr", "-1"], "-1"), (["--max-steps", "1.5"], "1.5"), (["--preset", "tiny"], "tiny"), (["--lr"], "--lr"),
    (["--preset"], "--preset")])
def test_wrong_flags_are_one_line(capsys, argv, said):
    assert said in refused(capsys, *argv)


def resumable(tmp_path, **more):
    folder = tmp_path / "run"
    folder.mkdir()
    args = vars(common.parse_args(run_parser(), ["--lr", "0.5", "--stop", "a", "b", "--seed", "3"])) | more
    (folder / "config.json").write_text(json.dumps({"args": args}))
    return str(folder)


def test_a_resumed_run_keeps_its_flags(tmp_path, capsys):
    run = resumable(tmp_path)
    args = common.parse_args(run_parser(), ["--resume", run, "--max-steps", "20"])
    assert (args.lr, args.stop, args.seed, args.max_steps, args.resume) == (0.5, ["a", "b"], 3, 20, run)
    same = common.parse_args(run_parser(), ["--resume", run, "--lr", "5e-1", "--seed", "3"])   # typed again, the same
    assert same.max_steps == 10
    for argv, flag in ((["--lr", "0.25"], "--lr 0.25"), (["--seed", "4"], "--seed 4"),
                       (["--num-generations", "8"], "--num-generations 8"), (["--stop", "a"], "--stop"),
                       (["--preset", "big"], "--preset big"), (["--task", "gsm8k"], "--task gsm8k")):
        assert flag in refused(capsys, "--resume", run, *argv)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"args": []}', "\xff"])
def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert "no run folder" in refused(capsys, "--resume", str(tmp_path))


def test_learning_rate_by_hand():
    def rates(schedule, warmup=2, steps=6):
        return [common.lr_at(s, steps, 8.0, warmup, schedule) for s in range(steps)]
    assert rates("constant") == [4, 8, 8, 8, 8, 8]
    assert rates("linear") == [4, 8, 8, 6, 4, 2]
    assert rates("cosine") == pytest.approx([4, 8, 8, 4 + 4 * 0.5 ** 0.5, 4, 4 - 4 * 0.5 ** 0.5])
    assert rates("linear", 0, 4) == [8, 6, 4, 2]
    assert rates("cosine", 4, 3) == [2, 4, 6]   # the warm-up is longer than the run


def test_due():
    assert [s for s in range(1, 13) if common.due(s, 5)] == [5, 10] and not any(common.due(s, 0) for s in range(9))
    assert [s for s in range(4, 25, 4) if common.due(s, 10, 4)] == [12, 20]   # strides of 4: the first one past each 10


@pytest.mark.parametrize("rows, per_step", [(10, 4), (7, 7), (5, 3), (3, 8), (1, 2)])
def test_every_epoch_is_a_permutation_wherever_one_starts(rows, per_step):
    steps = 4 * rows
    order = [common.order_at(s, per_step, rows, seed=1) for s in range(steps)]
    flat = list(itertools.chain(*order))
    epochs = [flat[i:i + rows] for i in range(0, len(flat) - rows + 1, rows)]
    assert all(sorted(e) == list(range(rows)) for e in epochs)
    assert all(common.order_at(s, per_step, rows, seed=1) == order[s] for s in (steps - 1, 0, steps // 2))
    if rows >= 7:
        assert epochs[0] != epochs[1] and order != [common.order_at(s, per_step, rows, seed=2) for s in range(steps)]


# ----------------------------------------------------------------------------------------------------------------------
# Packing and the head

class Letters(torch.nn.Module):
    """A body of one layer, position by position, so that fp64 gradients can be had by plain autograd."""

    def __init__(self, vocab, size, tied=True, seed=0):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(vocab, size, generator=gen, dtype=torch.float64))
        self.mix = torch.nn.Parameter(torch.randn(size, size, generator=gen, dtype=torch.float64))
        self.head = self.table if tied else torch.nn.Parameter(torch.randn(vocab, size, generator=gen).double())

    def forward(self, ids):
        return torch.tanh(self.table[ids] @ self.mix)


def batch(seed=0, vocab=11):
    """Ragged rows: holes in the mask, a row without a target, rows of one token, a row trained to its last place."""
    gen = torch.Generator().manual_seed(seed)
    length = torch.tensor([7, 1, 5, 9, 4, 2])
    ids = torch.randint(vocab, (6, 9), generator=gen)
    mask = torch.zeros(6, 9, dtype=torch.bool)
    mask[0, 3:7], mask[2, 1:5], mask[5, 1] = True, True, True
    mask[3, [2, 3, 6, 8]] = True   # injected tokens lie between
    mask[1, 0] = True              # nothing scores a first token
    weight = torch.randn(6, 8, generator=gen, dtype=torch.float64)   # fixed before the walk
    return ids, mask, length, weight


def plain_loss(model, ids, mask, length, weight, temperature, full):
    """The same loss over the full logits (B, T, V), by autograd."""
    logits = model(ids) @ model.head.t() / temperature
    logp = logits.log_softmax(-1)
    token = logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    trained = mask[:, 1:] & (torch.arange(1, ids.shape[1]) < length[:, None])
    each = token + 0.3 * (logp[:, :-1].exp() * logp[:, :-1]).sum(-1) if full else token.exp() + token ** 2
    return -(each * weight)[trained].sum()


def chunked_loss(model, ids, mask, length, weight, temperature, full, groups, chunk):
    """The same by the walk; leaves the gradients."""
    total = 0.0
    for rows in groups:
        p = common.pack_rows(ids, mask, length, rows, torch.device("cpu"))
        hidden = model(p.ids)[p.where]
        w = common.at_places(weight, p)

        def fn(logp, entropy, at):
            loss = -(w[at] * (logp.exp() + logp ** 2)).sum()
            return loss, {"loss": loss}

        def fn_full(logits, at):
            logp = logits.log_softmax(-1)
            token = logp.gather(1, p.targets[at, None])[:, 0]
            loss = -(w[at] * (token + 0.3 * (logp.exp() * logp).sum(-1))).sum()
            return loss, {"loss": loss}

        grad, sums = common.head_backward(hidden, model.head, p.targets, fn_full if full else fn, temperature, full,
                                          chunk)
        hidden.backward(grad)
        total += float(sums.get("loss", 0.0))
    return total


SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 3, 1], [0, 2, 4]], [[1, 4], [2, 0, 5], [3]]]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
@pytest.mark.parametrize("tied", [True, False])
def test_gradient_equals_plain_autograd_for_every_split(full, temperature, tied):
    """X21: 1e-10 in fp64 for hidden and weight, for micro-batches of every kind and chunks of every size."""
    ids, mask, length, weight = batch()
    model = Letters(11, 6, tied)
    want_loss = plain_loss(model, ids, mask, length, weight, temperature, full)
    want = torch.autograd.grad(want_loss, list(model.parameters()))
    for groups, chunk in itertools.product(SPLITS, (1, 2, 5, 64, None)):
        model.zero_grad()
        got = chunked_loss(model, ids, mask, length, weight, temperature, full, groups, chunk)
        assert got == pytest.approx(want_loss.item(), abs=1e-10)
        for p, g in zip(model.parameters(), want):
            assert (p.grad - g).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradient_of_a_transformer_for_every_split(kind, tied):
    """X21: the whole network, 1e-10 in fp64 and 1e-5 relative in fp32."""
    ids, mask, length, weight = batch(vocab=200)
    model = tiny_model(kind, scale=3.0, tie_word_embeddings=tied)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = model.to(dtype)
        model.compute_dtype = dtype
        grads = []
        for groups, chunk in zip(SPLITS, (None, 3, 1, 2)):
            model.zero_grad()
            for rows in groups:
                p = common.pack_rows(ids, mask, length, rows, model.device)
                hidden, w = model(p.ids, p.lengths)[p.where], common.at_places(weight, p).to(dtype)
                grad, _ = common.head_backward(hidden, model.head_weight, p.targets,
                                               lambda logp, entropy, at: ((w[at] * logp).sum(), {}), chunk=chunk)
                hidden.backward(grad)
            grads.append({k: p.grad.clone() for k, p in model.named_parameters()})
        largest = max(g.abs().max() for g in grads[0].values())
        for g in grads[1:]:
            for k in g:
                assert (g[k] - grads[0][k]).abs().max() < tolerance * largest, k


def test_entropy_and_log_probs_that_the_loss_sees():
    hidden, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 3, 1])
    dist = torch.distributions.Categorical(logits=hidden @ weight.t() / 0.7)
    seen = []

    def fn(logp, entropy, rows):
        assert torch.allclose(logp, dist.log_prob(targets)[rows]) and torch.allclose(entropy, dist.entropy()[rows])
        assert not entropy.requires_grad
        seen.extend(range(5)[rows])
        return logp.sum(), {"rows": torch.tensor(len(logp)), "logp": logp.sum()}

    grad, sums = common.head_backward(hidden, weight, targets, fn, temperature=0.7, chunk=2)
    assert seen == [0, 1, 2, 3, 4] and sums["rows"] == 5 and not sums["logp"].requires_grad
    assert sums["logp"].item() == pytest.approx(dist.log_prob(targets).sum().item())
    assert weight.grad is None   # a weight that is not trained gets none


def test_bf16_head_sums_in_fp32():
    """A head of bf16 factors whose logits are still exact in fp32: a bf16 sum of 4096 halves stops at 256."""
    hidden, weight = torch.full((2, 4096), 0.5).bfloat16(), torch.ones(3, 4096)
    assert torch.equal(common.output_logits(hidden, weight), torch.full((2, 3), 2048.0))


def test_rows_without_a_target_leave_zero_and_no_nan():
    """X4, X23: a batch in which nothing is trained."""
    ids, mask, length, _ = batch()
    model = Letters(11, 6)
    none = torch.zeros_like(mask)
    p = common.pack_rows(ids, none, length, [0, 1, 2], torch.device("cpu"))
    assert p.lengths == [7, 1, 5] and len(p.ids) == 13 and len(p.where) == len(p.targets) == 0
    hidden = model(p.ids)[p.where]
    grad, sums = common.head_backward(hidden, model.head, p.targets, lambda logp, e, at: (logp.sum(), {}))
    hidden.backward(grad)
    assert sums == {} and all((q.grad == 0).all() for q in model.parameters())


def test_pack_by_hand():
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]]).bool()   # row 1: the mask of padding means nothing
    p = common.pack_rows(ids, mask, torch.tensor([4, 2, 3]), [2, 1, 0], torch.device("cpu"))
    assert p.ids.tolist() == [11, 12, 13, 9, 10, 5, 6, 7, 8] and p.lengths == [3, 2, 4]
    assert p.where.tolist() == [0, 6, 7] and p.targets.tolist() == [12, 7, 8]
    assert p.row.tolist() == [2, 0, 0] and p.col.tolist() == [0, 1, 2]
    values = torch.arange(9.0).view(3, 3)
    assert common.at_places(values, p).tolist() == [6, 1, 2] and common.at_places(None, p) is None


def test_micro_batches_keep_the_order_and_the_limit():
    length = torch.tensor([3, 4, 9, 1, 1, 1, 5])
    assert common.micro_batches(length, range(7), 7) == [[0, 1], [2], [3, 4, 5], [6]]   # row 2 is too long: alone
    assert common.micro_batches(length, [6, 0], 100) == [[6, 0]] and common.micro_batches(length, [], 5) == []
    for tokens in range(1, 30):
        groups = common.micro_batches(length, range(7), tokens)
        assert list(itertools.chain(*groups)) == list(range(7))
        assert all(len(g) == 1 or int(length[g].sum()) <= tokens for g in groups)


def test_logits_at_masked_places_do_not_move_the_loss():
    """X5: bit-identical where the mask is 0, another loss where it is 1."""
    ids, mask, length, weight = batch()
    p = common.pack_rows(ids, mask, length, range(6), torch.device("cpu"))
    flat = torch.randn(len(p.ids), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    head = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss(states):
        w = common.at_places(weight, p)
        return common.head_backward(states[p.where], head, p.targets, lambda logp, e, at: (
            (w[at] * logp).sum(), {"loss": (w[at] * logp).sum()}))[1]["loss"]

    before, trained = loss(flat), set(p.where.tolist())
    assert 0 < len(trained) < len(flat)
    for place in range(len(flat)):
        changed = flat.clone()
        changed[place] += 1.0
        assert torch.equal(loss(changed), before) == (place not in trained)


def test_score_equals_transformers(tmp_path):
    """Log-probs and entropies of the sampled tokens, whatever shares their pack (X17), with the temperature (X13)."""
    folder = tiny_folder(tmp_path / "m", "qwen3", scale=4.0)
    from model import load_model
    model, hf = load_model(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, mask, length, _ = batch(vocab=200)
    r = SimpleNamespace(ids=ids, mask=mask, length=length)
    for temperature in (1.0, 0.6):
        logp, entropy = common.score(model, r, temperature)
        for b in range(6):
            n = int(length[b])
            with torch.no_grad():
                want = (hf(ids[b:b + 1, :n]).logits[0] / temperature).log_softmax(-1)
            for t in range(8):
                if t + 1 < n and mask[b, t + 1]:
                    assert logp[b, t].item() == pytest.approx(want[t, ids[b, t + 1]].item(), abs=1e-4)
                    assert entropy[b, t].item() == pytest.approx(-(want[t].exp() * want[t]).sum().item(), abs=1e-4)
                else:
                    assert logp[b, t] == 0 and entropy[b, t] == 0
        for tokens in (1, 10, 17):
            again = common.score(model, r, temperature, tokens)
            assert torch.allclose(again[0], logp, atol=1e-5) and torch.allclose(again[1], entropy, atol=1e-5)
        again = common.score(model, r, temperature)
        assert torch.equal(again[0], logp) and torch.equal(again[1], entropy)   # X18


def test_score_of_a_hand_built_model_of_two_tokens():
    """
    X16. Attention and MLP write nothing; the states are the normalised embeddings (2, 1) / sqrt(2.5) of token 0 and
    (1, 3) / sqrt(5) of token 1, and the head is untied with rows (1, 0) and (0, 1): the logits are those states.
    """
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2, "hidden_size": 2,
           "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "rms_norm_eps": 0.0,
           "tie_word_embeddings": False}
    model = new_model(raw, 0)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.tensor([[2.0, 1], [1, 3]]))
        model.lm_head.weight.copy_(torch.eye(2))
    r = SimpleNamespace(ids=torch.tensor([[0, 1, 1, 0]]), mask=torch.tensor([[False, True, False, True]]),
                        length=torch.tensor([4]))
    after_0 = -math.log1p(math.exp((2 - 1) / math.sqrt(2.5)))   # log p(1 | 0): logits differ by 1 / sqrt(2.5)
    after_1 = -math.log1p(math.exp((3 - 1) / math.sqrt(5)))     # log p(0 | 1)
    logp, _ = common.score(model, r)
    assert logp[0].tolist() == pytest.approx([after_0, 0, after_1], abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "5"}, {"role": "user", "content": "And 4 + 4?"}]


def test_a_tokenizer_that_adds_bos_does_not_add_it_twice():
    """X6: a template that writes BOS and a tokenizer that adds it."""
    t = tiny_tokenizer()
    t.bos_token = "<|system|>"
    t.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", t.bos_token_id)])
    t.chat_template = "{{ bos_token }}" + t.chat_template
    assert t("a")["input_ids"][0] == t.bos_token_id   # it does add one where it may
    ids = common.encode_prompt(t, CHAT[1:2])
    assert ids[0] == t.bos_token_id and ids.count(t.bos_token_id) == 1
    assert ids == t.apply_chat_template(CHAT[1:2], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert t.bos_token_id not in common.encode_completion(t, "5", EOS)


def test_prompt_and_completion_are_prefix_and_rest_of_the_whole_chat():
    t = tiny_tokenizer()
    prompt, answer = common.encode_prompt(t, CHAT), common.encode_completion(t, "It is 8.", EOS)
    whole = t.apply_chat_template(CHAT + [{"role": "assistant", "content": "It is 8."}], tokenize=False)
    assert t.decode(prompt + answer) == whole and answer[-1] == EOS and answer.count(EOS) == 1
    mask = [0] * len(prompt) + [1] * len(answer)
    assert common.show_row(t, prompt + answer, mask) == t.decode(prompt) + "[[It is 8.<|end|>]]"
    assert common.show_row(t, answer, [1, 1] + [0] * (len(answer) - 2)) == "[[It]] is 8.<|end|>"


def test_the_end_token_is_trained_where_padding_is_the_same_token():
    """X1, X3, X10: pad == eos. The end of each answer is trained, padding and the answers in the prompt are not."""
    t = tiny_tokenizer()
    t.pad_token = t.eos_token
    rows = [(common.encode_prompt(t, chat), common.encode_completion(t, text, EOS))
            for chat, text in ((CHAT, "8"), (CHAT[1:2], "The sum is 5."))]
    ids, mask, length = as_batch(rows)
    for i, (x, y) in enumerate(rows):
        assert ids[i, :length[i]].tolist() == x + y
        assert mask[i].tolist() == [False] * len(x) + [True] * len(y) + [False] * (ids.shape[1] - len(x) - len(y))
        assert ids[i, length[i] - 1] == EOS and mask[i, length[i] - 1]
    model = tiny_model(scale=3.0)
    p = common.pack_rows(ids, mask, length, [0, 1], model.device)
    seen = {}

    def fn(logp, entropy, at):
        loss, metrics = sft_loss(logp, entropy, at, len(p.targets))
        seen["g"] = torch.autograd.grad(loss, logp, retain_graph=True)[0]
        return loss, metrics

    common.head_backward(model(p.ids, p.lengths)[p.where], model.head_weight, p.targets, fn)
    ends = p.targets == EOS
    assert ends.sum() == 2 and (seen["g"][ends] != 0).all() and len(p.targets) == sum(len(y) for _, y in rows)


def test_a_template_that_cannot_render_is_one_line():
    t = tiny_tokenizer()
    t.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(UserError, match="cannot render .*no such role"):
        common.encode_prompt(t, CHAT)


def test_tokenizers_that_are_missing_or_have_no_template(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        common.load_tokenizer(tmp_path)
    t = tiny_tokenizer()
    template = t.chat_template
    t.chat_template = None
    t.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no chat template; give one with --template"):
        common.load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="--template .*nowhere"):
        common.load_tokenizer(tmp_path, tmp_path / "nowhere")
    (tmp_path / "t.jinja").write_text(template)
    loaded = common.load_tokenizer(tmp_path, tmp_path / "t.jinja")
    assert common.encode_prompt(loaded, CHAT) == common.encode_prompt(tiny_tokenizer(), CHAT)


def test_a_tokenizer_that_is_larger_than_the_weights_is_refused_where_it_matters(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    tokenizer, config = common.load_tokenizer(folder), json.loads((folder / "config.json").read_text())
    tokenizer.add_tokens(["<later-pad>"])   # an id behind the embedding that no prompt has
    tokenizer.save_pretrained(folder)
    assert len(common.load_tokenizer(folder)) > config["vocab_size"]
    tokenizer.chat_template = "<later-pad>" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=f"writes id {config['vocab_size']} .'<later-pad>'. in a plain prompt.*belong"):
        common.load_tokenizer(folder)


def test_prompt_numbers_do_not_hang_on_the_process():
    assert common.prompt_number("123456789") == 0xCBF43926   # the published check value of CRC-32


# ----------------------------------------------------------------------------------------------------------------------
# Task files

GOOD = problem(0, "2 + 3?", "5")


@pytest.mark.parametrize("line, reason", [
    ("{", "Expecting property name"), ("[1]", "not a JSON object"), ("7", "not a JSON object"), ("nope", "Expecting"),
    (json.dumps(GOOD)[:-5], ""), (json.dumps({k: v for k, v in GOOD.items() if k != "id"}), "id is missing"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "answer"}), "answer is missing"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "prompt"}), "prompt is missing"),
    (json.dumps(GOOD | {"id": 7}), "`id` must be a text, got 7"), (json.dumps(GOOD | {"id": ""}), "`id`"),
    (json.dumps(GOOD | {"prompt": "2 + 3?"}), "`prompt` must be a list"),
    (json.dumps(GOOD | {"prompt": []}), "`prompt` must be a list"),
    (json.dumps(GOOD | {"prompt": [{"role": "user"}]}), "`prompt` holds"),
    (json.dumps(GOOD | {"prompt": [{"role": "user", "content": None}]}), "`prompt` holds"),
    (json.dumps(GOOD | {"prompt": ["2 + 3?"]}), "`prompt` holds"),
    (json.dumps(GOOD | {"answer": None}), "`answer`"), (json.dumps(GOOD | {"answer": True}), "`answer`"),
    (json.dumps(GOOD | {"answer": [5]}), "`answer`"), ('{"id": "a", "answer": NaN}', ""),
    (json.dumps(GOOD | {"answer": "five"}), "'five' is not a number"),
    (json.dumps(GOOD | {"answer": ""}), "'' is not a number"),
    # an answer key that is read in part would pay for a wrong answer (T71)
    (json.dumps(GOOD | {"answer": "3 or 4"}), "'3 or 4' is not a number"),
    (json.dumps(GOOD | {"answer": "12:30"}), "'12:30' is not a number"),
    (json.dumps(GOOD | {"answer": "2*3"}), "'2*3' is not a number"),
    (json.dumps(GOOD | {"answer": "1/0"}), "'1/0' is not a number"),
    (json.dumps(GOOD | {"answer": "1,23"}), "'1,23' is not a number"),
])
def test_a_malformed_task_row_is_refused_with_file_line_and_reason(tmp_path, line, reason):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n" + json.dumps(problem(1, "?", "1")) + "\n")
    with pytest.raises(UserError) as e:
        envs.load_rows(path, envs.Arithmetic())
    assert str(e.value).startswith(f"{path}:3: ") and reason in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("answer", ["5", 5, -7, "-7", "1,234", "$29.00", "1/2", "0.25", "50%", " 18 ", "007"])
def test_answer_keys_that_are_numbers(tmp_path, answer):
    path = write_rows(tmp_path / "tasks.jsonl", [GOOD | {"answer": answer}])
    assert envs.load_rows(path, envs.Arithmetic())[0]["answer"] == answer


@pytest.mark.parametrize("row, reason", [
    ({"prompt": CHAT}, "completion is missing"), ({"prompt": CHAT, "completion": []}, "`completion` must be"),
    ({"prompt": CHAT, "completion": [{"role": "assistant", "content": " \n"}]}, "nothing to train on")])
def test_a_malformed_textbook_row_is_refused(tmp_path, row, reason):
    path = write_rows(tmp_path / "book.jsonl", [row])
    with pytest.raises(UserError, match=":1: .*" + re.escape(reason)):
        common.read_rows(path, common.check_textbook_row)


def test_files_that_are_empty_missing_or_no_text(tmp_path):
    path = tmp_path / "tasks.jsonl"
    with pytest.raises(UserError, match="cannot be read"):
        common.read_rows(path, common.check_task_row)
    for text in ("", "\n \n"):
        path.write_text(text)
        with pytest.raises(UserError, match="no rows"):
            common.read_rows(path, common.check_task_row)
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(UserError, match="cannot be read"):
        common.read_rows(path, common.check_task_row)


def test_rows_keep_their_order_and_odd_signs(tmp_path):
    path = tmp_path / "tasks.jsonl"
    rows = [problem(i, f"a\u2028b\x85{i}", i) for i in range(5)]
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    assert common.read_rows(path, common.check_task_row) == rows
    assert common.read_rows(path, common.check_task_row, limit=2) == rows[:2]
    write_rows(path, [problem(1, "a", 1), problem(2, "b", 2), problem(1, "c", 3)])
    with pytest.raises(UserError, match="'p1' stands on two rows"):
        envs.load_rows(path, envs.Arithmetic())


# ----------------------------------------------------------------------------------------------------------------------
# Numbers

F = Fraction
TABLE = [   # text, strict reading, lenient reading (X42; T66 to T71)
    # the mark and what may stand around the number
    ("#### 18", 18, 18), ("####18", 18, 18), ("So 6 * 3 = 18.\n#### 18", 18, 18), ("####\t18", 18, 18),
    ("#### 18\r\n", 18, 18), ("####\u00a018", 18, 18), ("####: 18", 18, 18), ("#### = 18", 18, 18),
    ("#### **18**", 18, 18), ("**#### 18**", 18, 18), ("#### `18`", 18, 18), ("#### (18)", 18, 18),
    ("#### 18 apples", 18, 18), ("#### 18.", 18, 18), ("#### 18!", 18, 18), ("#### 18, as said", 18, 18),
    ("##### 18", 18, 18), ("#### 007", 7, 7), ("#### +5", 5, 5), ("#### 3x as many", 3, 3),
    # text behind the mark does not hide it, however long; it is read on its own line
    ("#### 18\n" + "x" * 500, 18, 18), ("#### 18\n" + "and 7 more " * 100, 18, 18), ("####\n18", None, 18),
    ("#### 18 " + "y" * 500, 18, 18), ("z" * 5000 + "\n#### 18", 18, 18),
    # the last mark counts, also when a few-shot example is recited first
    ("#### 3\n#### 4", 4, 4), ("#### 3 #### 4", 4, 4), ("#### 4\nWait, #### no", None, 4), ("#### 18\n####", None, 18),
    # money, thousands, decimals
    ("#### $42", 42, 42), ("#### $29.00", 29, 29), ("#### 29.00", 29, 29), ("#### \\$29", 29, 29), ("#### €5", 5, 5),
    ("#### 5€", 5, 5), ("#### 1,234", 1234, 1234), ("#### 1,234.", 1234, 1234), ("#### $1,234,567.50", F("1234567.5"),
                                                                                F("1234567.5")),
    ("#### 0.5", F(1, 2), F(1, 2)), ("#### .5", F(1, 2), F(1, 2)), ("#### 3.10", F("3.1"), F("3.1")),
    ("#### 1{,}234", 1234, 1234), ("#### 12\\,000", 12000, 12000),
    # signs
    ("#### -3", -3, -3), ("#### - 3", -3, -3), ("#### \u22123", -3, -3), ("#### \u20133", -3, -3),
    ("#### -$40", -40, -40), ("#### $-40", -40, -40), ("#### $-3$", -3, -3), ("#### -0.5", F(-1, 2), F(-1, 2)),
    ("#### -.5", F(-1, 2), F(-1, 2)), ("#### -1/2", F(-1, 2), F(-1, 2)), ("#### -0", 0, 0),
    # fractions, percent, LaTeX
    ("#### 1/2", F(1, 2), F(1, 2)), ("#### 3 / 4", F(3, 4), F(3, 4)), ("#### 50%", 50, 50), ("#### 50 %", 50, 50),
    ("#### \\frac{3}{4}", F(3, 4), F(3, 4)), ("#### $\\dfrac{3}{4}$", F(3, 4), F(3, 4)),
    ("#### -\\frac{3}{4}", F(-3, 4), F(-3, 4)), ("#### \\boxed{7}", 7, 7), ("#### $\\boxed{-7}$", -7, -7),
    ("#### \\boxed{\\frac{3}{4}}", F(3, 4), F(3, 4)), ("#### \\(18\\)", 18, 18), ("#### \\text{18}", 18, 18),
    ("#### $18$", 18, 18), ("#### 1/0", None, None),
    # no number, or only the first part of one, is no answer: an expression was not worked out
    ("", None, None), ("no number", None, None), ("...", None, None), ("72 clips, altogether.", None, 72),
    ("####", None, None), ("#### five", None, None), ("#### nan", None, None), ("#### inf", None, None),
    ("#### x = 5", None, 5), ("#### The answer is 5", None, 5), ("### 18", None, 18),
    ("#### 2*3", None, 3), ("#### 7 - 3", None, 3), ("#### 10-3", None, 3), ("#### 5 + 6 = 11", None, 11),
    ("#### 10^3", None, 3), ("#### 10**3", None, 3), ("#### 2 \\times 9", None, 9), ("#### 3:30", None, 30),
    ("#### 2024-01-05", None, 5), ("#### 3 1/2", None, F(1, 2)), ("#### 3\\frac{1}{2}", None, F(1, 2)),
    ("#### 12,34", None, 34), ("#### 1.2.3", None, F(3, 10)), ("#### 1e5", None, 5), ("#### 1 234", None, 234),
    ("#### 5 or 6", 5, 5), ("#### 5, 6", 5, 5),   # the first of two counts: naming more gains nothing
    ("#### " + "9" * 5000, None, None),           # more digits than int() takes
    # the lenient reading without a mark: the box, else the last number
    ("\\boxed{18} and not 6", None, 18), ("\\boxed{\\frac{3}{4}} of 8", None, F(3, 4)), ("$\\boxed{12\\%}$", None, 12),
    ("\\boxed{1,000}", None, 1000), ("\\boxed{\\$5}", None, 5), ("\\boxed{-\\frac{3}{4}} at 9", None, F(-3, 4)),
    ("first \\boxed{3}, then \\boxed{4} of 9", None, 4), ("\\boxed{x} then 4", None, 4), ("\\boxed{} 6", None, 6),
    ("72, altogether.", None, 72), ("The answer is 18...", None, 18), ("It costs $29.00.", None, 29),
    ("1,234 in all.", None, 1234), ("100,000.", None, 100000), ("16 - 3 = 13", None, 13), ("5+6=11", None, 11),
    ("x=-3", None, -3), ("It is -40", None, -40), ("(-3)", None, -3), ("So it is -$5.", None, -5),
    ("1/2", None, F(1, 2)), ("He has 50%", None, 50), ("part-2", None, 2), ("from 7-3", None, 3),
    ("pages 3\u20135", None, 5), ("5%-10%", None, 10), ("10 - 7", None, 7), ("The answer:\n- 18 eggs", None, 18),
    ("temperature \u22125", None, -5),
    ("5/0", None, None), ("room 1b", None, 1),
]


def test_the_table_is_long_enough_and_has_no_double():
    assert len(TABLE) >= 60 and len({row[0] for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("text, strict, lenient", TABLE, ids=[repr(row[0][:32]) for row in TABLE])
def test_reading_of_numbers(text, strict, lenient):
    assert common.strict_answer(text) == strict
    assert common.lenient_answer(text) == lenient
    if strict is not None:
        assert common.lenient_answer(text) == strict   # what is right strictly is right leniently
        assert isinstance(common.strict_answer(text), Fraction)


def test_reading_is_fast_on_hostile_text():
    start = time.process_time()
    for text in ("1" * 100_000, "1," * 50_000, "#### " + "1,111" * 20_000, "1/" * 50_000, "-" * 100_000 + "1",
                 "####" * 25_000, "#### " + "(" * 100_000, "\\frac{1" * 20_000, " " * 100_000 + "7", "1.1" * 30_000,
                 "$ " * 50_000, "- " * 50_000, "1/" + "1" * 100_000 + "/", "1" + ",111" * 30_000 + "1"):
        common.strict_answer(text)
        common.lenient_answer(text)
    assert time.process_time() - start < 5   # half a second, were it not quadratic somewhere


def test_numbers_are_compared_exactly_but_for_rounding():
    same = common.same_number
    assert same(F(1, 3), F("0.3333333")) and not same(F(1, 3), F("0.333")) and same(F(29), F("29.00"))
    assert not same(F(3), F(-3)) and not same(None, F(3)) and not same(F(3), None) and not same(None, None)


def renderings(gold, few=False):
    """The required format, and the ways in which models write it."""
    n = Fraction(gold)
    plain = str(n) if n.denominator == 1 else f"{float(n):g}"
    with_commas = f"{int(n):,}" if n.denominator == 1 else plain
    texts = [f"1 + 1 = 2\n#### {plain}", f"#### {'-' if n < 0 else ''}${with_commas.lstrip('-')}"]
    return texts if few else texts + [f"So it is {plain}.\n#### {plain}", f"#### {with_commas}", f"####{plain}\n",
                                      f"#### {plain}.", f"#### {plain} of 99"]


def check_gold(task, row, few=False):
    """X44: a gold answer scores 1 in every rendering, and a neighbour 0."""
    gold = Fraction(str(row["answer"]).replace(",", ""))
    for text in renderings(gold, few):
        got = task.grade(text, row)
        assert got["right"] and got["lenient"], (row["answer"], text)
    for text in renderings(gold + 1, few) + ([] if few else renderings(gold - 1) + renderings(-gold or gold + 2)):
        got = task.grade(text, row)
        assert not got["right"] and not got["lenient"], (row["answer"], text)


def test_every_gold_of_the_generated_problems(tmp_path):
    import importlib.util
    spec = importlib.util.spec_from_file_location("prepare_arithmetic_for_gold", ROOT / "data/arithmetic/prepare.py")
    prepare = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = prepare
    spec.loader.exec_module(prepare)
    prepare.make_tasks(tmp_path)
    task = envs.Arithmetic(tmp_path)
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) >= 3
    for path in files:
        for row in task.load(path.stem):
            check_gold(task, row, few=True)
            assert task.grade(row["solution"], row)["right"]   # solutions by construction are right, too


def test_golds_over_the_whole_range():
    rng, task = random.Random(0), envs.Arithmetic()
    for _ in range(300):
        size = 10 ** rng.randint(1, 12)
        check_gold(task, {"answer": rng.choice([rng.randint(-size, size), f"{rng.randint(-size, size):,}"])})


@pytest.mark.skipif(not (DATA / "gsm8k").exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("split, count", [("train", 7473), ("test", 1319)])
def test_every_gold_of_gsm8k(split, count):
    task, rows = envs.GSM8K(), read_rows(DATA / "gsm8k" / f"{split}.jsonl")
    assert len(rows) == count
    for i, row in enumerate(rows):
        gold = row["answer"].rpartition("####")[2].strip()
        task.check({"answer": gold})
        check_gold(task, {"answer": gold}, few=True)
        assert task.grade(row["answer"], {"answer": gold})["right"], (split, i)


def test_a_truncated_row_and_a_wrong_mark_are_wrong():
    """The mark is what is paid: a right number beside a wrong mark is wrong in both readings."""
    grade = envs.Arithmetic().grade
    row = {"answer": "18"}
    assert grade("It is 18.", row) == {"right": False, "lenient": True, "answer": None}
    assert grade("#### 17 (or 18)", row) == {"right": False, "lenient": False, "answer": "17"}
    assert grade("#### 18.0", row) == {"right": True, "lenient": True, "answer": "18"}


# ----------------------------------------------------------------------------------------------------------------------
# pass@k and statistics

def test_pass_at_k_equals_enumeration():
    """X46: the share of all k-subsets of n samples that hold a right one."""
    for n in range(1, 9):
        for c in range(n + 1):
            row = [1] * c + [0] * (n - c)
            values = []
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(row, k))
                values.append(common.pass_at_k(n, c, k))
                assert values[-1] == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)
            assert values == sorted(values) and values[0] == pytest.approx(c / n)
            assert values[-1] == (c > 0)
    assert common.pass_at_k(10 ** 6, 1, 10 ** 5) == pytest.approx(0.1)   # without factorials
    assert common.pass_at_k(4, 1, 4) == 1.0   # not the .684 of drawing with replacement (T78)


@pytest.mark.parametrize("n, c, k", [(4, 0, 5), (4, 4, 8), (4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_pass_at_k_outside_its_range_raises(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        common.pass_at_k(n, c, k)


def test_mean_and_standard_error_by_hand():
    assert common.mean_and_se([1, 2, 3, 6]) == pytest.approx((3, math.sqrt(14 / 3 / 4)))
    assert common.mean_and_se([0.5]) == (0.5, None)
    assert common.paired_difference([1, 2, 3], [2, 2, 5]) == pytest.approx((1, math.sqrt(1 / 3)))
    with pytest.raises(ValueError, match="same problems"):
        common.paired_difference([1, 2], [1, 2, 3])


def coverage(draw, truth, sims=400, seed=0):
    """Share of simulated evaluations whose 95% interval holds the truth, and the kinds that were used."""
    rng, hits, kinds = np.random.default_rng(seed), 0, set()
    for i in range(sims):
        low, high, kind = common.interval(draw(rng), seed=i, repeats=1000)
        assert 0 <= low <= high <= 1
        hits += low - 1e-12 <= truth <= high + 1e-12
        kinds.add(kind)
    return hits / sims, kinds


@pytest.mark.parametrize("truth, spread", [(0.2, 0.1), (0.35, 0.3), (0.5, 0.2), (0.65, 0.3), (0.8, 0.1)])
@pytest.mark.parametrize("n, k", [(1, 1), (32, 1)])
def test_the_interval_covers_in_the_middle(truth, spread, n, k):
    """X47: 93 to 97% (and two standard errors of the simulation) for values between .2 and .8, 120 problems."""
    a = truth * (1 / spread - 1)
    b = (1 - truth) * (1 / spread - 1)   # each problem has a chance of its own, Beta(a, b)

    def draw(rng):
        c = rng.binomial(n, rng.beta(a, b, 120))
        return [common.pass_at_k(n, int(x), k) for x in c]

    got, kinds = coverage(draw, truth)
    assert kinds == {"bootstrap"} and 0.93 - 0.022 <= got <= 0.97 + 0.022


@pytest.mark.slow
@pytest.mark.parametrize("truth", [0.2, 0.5, 0.8])
def test_the_interval_covers_in_the_middle_exactly(truth):
    """The same with enough simulations to hold the bounds themselves (standard error .004)."""
    def draw(rng):
        return rng.binomial(32, rng.beta(truth * 4, (1 - truth) * 4, 120)) / 32
    got, _ = coverage(draw, truth, sims=3000)
    assert 0.93 <= got <= 0.97


@pytest.mark.parametrize("truth", [0.998, 0.002, 0.98])
def test_the_interval_covers_near_the_ends(truth):
    """The percentile bootstrap would hold a true pass@32 of .998 in 9 of 100 evaluations of 60 problems."""
    got, kinds = coverage(lambda rng: rng.binomial(1, truth, 60), truth)
    assert "wilson" in kinds and got >= 0.90   # at .98, a few of the simulated means are below .9
    rare = coverage(lambda rng: np.where(rng.random(60) < 0.02, 0.9, 1.0) if truth > 0.5 else
                    np.where(rng.random(60) < 0.02, 0.1, 0.0), 0.998 if truth > 0.5 else 0.002)[0]
    assert rare >= 0.90
    low, high, kind = common.interval([1.0] * 60)
    assert kind == "wilson" and high == 1.0 and 0.9 < low < 1   # not the point interval [1, 1]


def test_the_interval_resamples_problems_not_samples():
    """Problems that are all right or all wrong: 20 problems x 32 samples are 20 draws, not 640."""
    values = [1.0] * 10 + [0.0] * 10
    low, high, _ = common.interval(values)
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 20), rel=0.12)
    assert common.interval(values) == common.interval(values)   # its own seed


# ----------------------------------------------------------------------------------------------------------------------
# Run folders

@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(...) -> a Run of a script in tmp_path whose records go there too. Hooks and signals are put back after."""
    script = tmp_path / "train_thing.py"
    script.write_text("print('the method')\n")
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "0.5"])
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    tasks = write_rows(tmp_path / "tasks.jsonl", [GOOD])
    book, last = str(tmp_path / "labbook.md"), []

    def make(*argv, begin=True):
        args = common.parse_args(run_parser(), ["--lr", "0.5", "--labbook", book, *map(str, argv)])
        for before in last:   # its process is dead
            if hasattr(before, "held"):
                before.held.close()
        run = common.Run(args, "grpo")
        last.append(run)
        if begin:
            run.start(tiny_folder(tmp_path / "m"), [tasks], torch.device("cpu"), {})
        return run

    make.book, make.tasks = book, tasks
    yield make
    for s, handler in handlers.items():
        signal.signal(s, handler)


RESULT = {"pass_at": {"1": 0.25, "8": 0.5}, "lenient_pass_at": {"1": 0.3, "8": 0.5}, "se": {"1": 0.1, "8": 0.1},
          "greedy_pass": 0.5, "lenient_greedy_pass": 0.5, "mean_length": 9.0, "truncated": 0.0, "entropy": 1.0,
          "behaviour": {"parsable": 0.75}}


def test_a_run_leaves_its_folder_and_two_records(tmp_path, start, capsys):
    run = start("--output-dir", tmp_path / "out", "--notes", "a try", "--price-per-hour", "2", "--seed", "3")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["args"]["lr"] == 0.5 and config["argv"] == ["--lr", "0.5"] and "torch" in config["versions"]
    assert (tmp_path / "out" / "train_thing.py").read_text() == "print('the method')\n"
    run.evaluated(0, {"heldout-same": RESULT})
    for step in (1, 2):
        run.log(step, {"reward": 0.1 * step, "loss": float("nan") if step == 2 else 1.0, "step_s": 0.1}, 2, ["reward"])
    run.budget["prompts"] += 4
    run.evaluated(2, {"heldout-same": RESULT | {"pass_at": {"1": 0.75, "8": 0.9}}})
    with pytest.raises(SystemExit) as e:
        run.finish("well done")
    assert e.value.code == 0
    out = capsys.readouterr().out.strip().split("\n")
    assert "heldout-same pass@1 0.250 -> 0.750" in out[-1] and "well done" in out[-1] and str(run.folder) in out[-1]
    (first, last), problems = common.read_labbook(start.book)
    assert problems == [] and first["kind"] == "start" and last["kind"] == "run" and last["status"] == "ok"
    assert first["run_id"] == last["run_id"] == "out" and last["seed"] == 3 and last["notes"] == "a try"
    for key in ("kind prev run_id parent time script arm task model data seed config budget losses scores status git "
                "versions device notes").split():
        assert key in last, key
    assert last["script"] == "train_thing" and last["arm"] == "grpo" and last["model"]["name"] == "some/model"
    assert last["data"] == [{"path": "tasks.jsonl", "sha256": common.sha256_file(start.tasks), "rows": 1}]
    assert last["model"]["sha256"] == common.sha256_file(tmp_path / "m" / "model.safetensors")
    scores = last["scores"]["heldout-same"]
    assert scores["before"]["pass@1"] == 0.25 and scores["after"]["pass@8"] == 0.9
    assert scores["after"]["greedy"] == 0.5 and scores["after"]["parsable"] == 0.75
    assert last["budget"]["prompts"] == 4 and last["budget"]["cost"] is not None and last["budget"]["wall_s"] >= 0
    assert json.loads((run.folder / "final.json").read_text()) == last
    rows = read_rows(run.folder / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2] and rows[1]["loss"] is None   # strict JSON
    csv = (run.folder / "curves.csv").read_text().split("\n")
    assert csv[0].split(",")[0] == "step" and "heldout-same.pass@1" in csv[0] and len(csv) == 5   # steps 0, 1, 2
    assert (run.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_folder_that_exists_is_refused(tmp_path, start):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UserError, match="out exists"):
        start("--output-dir", tmp_path / "out", begin=False)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("flag, place", [("--labbook", "no/such/labbook.md"), ("--curves", "no/such/curves.csv")])
def test_places_that_cannot_be_written_are_refused_before_anything_is(tmp_path, start, flag, place):
    with pytest.raises(UserError, match=flag):
        start("--output-dir", tmp_path / "out", flag, tmp_path / place, begin=False)
    assert not (tmp_path / "out").exists() and not (tmp_path / "labbook.md").exists()


def test_two_runs_of_one_second_have_two_folders(start, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *a: "240101-000000")
    a, b = start(), start()
    assert a.folder != b.folder and a.folder.is_dir() and b.folder.is_dir()
    assert a.folder.name == "train_thing-grpo-arithmetic-s0-240101-000000"


def test_a_failed_run_says_so(tmp_path, start):
    run = start("--output-dir", tmp_path / "out")
    assert "no checkpoint yet" in run.fail("the loss is not finite", "Traceback ...")
    assert (run.folder / "error.txt").read_text() == "Traceback ..."
    run.save(5, lambda folder: folder.mkdir())
    assert "checkpoint-000005" in run.fail("again", "Traceback ...")   # and no second record
    records, _ = common.read_labbook(start.book)
    assert [r["kind"] for r in records] == ["start", "run"]
    assert records[1]["status"] == "failed" and records[1]["notes"] == "the loss is not finite"


def test_a_run_that_never_started_leaves_nothing(tmp_path, start):
    run = start("--output-dir", tmp_path / "out", begin=False)
    assert run.fail("x", "y") == ""
    assert not (tmp_path / "out").exists() and not (tmp_path / "labbook.md").exists()


def test_a_signal_is_seen_by_the_loop_and_ends_in_its_own_status(tmp_path, start, capsys):
    for name, code in (("SIGINT", 130), ("SIGTERM", 143)):
        run = start("--output-dir", tmp_path / name)
        os.kill(os.getpid(), getattr(signal, name))
        assert run.stopped == name
        with pytest.raises(KeyboardInterrupt):   # the second one means now
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.01)
        with pytest.raises(SystemExit) as e:     # stopped before the first step: nothing to draw is no error
            run.finish()
        assert e.value.code == code
        assert f"{name}, all saved" in capsys.readouterr().out.strip().split("\n")[-1]
        assert common.read_labbook(start.book)[0][-1]["status"] == "stopped"


def test_checkpoints_are_whole_behind_the_link_at_every_moment(tmp_path, start):
    run = start("--output-dir", tmp_path / "out", "--keep", "2")
    link = run.folder / "checkpoint"

    def writer(step, die=False):
        def write(folder):
            assert not folder.exists()
            if step > 1:   # the old one is whole while the new one is written
                assert (link / "resume.pt").read_text() == str(step - 1)
            folder.mkdir()
            (folder / "model").write_text("half")
            if die:
                raise KeyboardInterrupt
            (folder / "resume.pt").write_text(str(step))
        return write

    for step in (1, 2, 3, 4):
        run.save(step, writer(step))
        assert (link / "resume.pt").read_text() == str(step) and not os.path.isabs(os.readlink(link))
    names = {p.name for p in run.folder.iterdir() if p.name.startswith("checkpoint-")}
    assert names == {"checkpoint-000003", "checkpoint-000004"}
    with pytest.raises(KeyboardInterrupt):
        run.save(5, writer(5, die=True))
    assert (link / "resume.pt").read_text() == "4"
    run.save(5, writer(5))   # over what the kill left
    assert (link / "resume.pt").read_text() == "5"


def test_a_later_checkpoint_that_a_kill_left_does_not_push_out_a_good_one(tmp_path, start):
    """Killed after checkpoint 30 was written and before its link: the run goes on from 20, and ends at 25."""
    run = start("--output-dir", tmp_path / "out")
    run.save(20, lambda folder: folder.mkdir())
    (run.folder / "checkpoint-000030").mkdir()
    (run.folder / "checkpoint-000030.tmp").mkdir()
    run.save(25, lambda folder: folder.mkdir())
    assert (run.folder / "checkpoint").resolve().name == "checkpoint-000025"
    assert sorted(p.name for p in run.folder.glob("checkpoint*")) == ["checkpoint", "checkpoint-000025"]
    assert (run.folder / "checkpoint").is_dir()


def test_restore_cuts_what_later_steps_wrote(tmp_path, start):
    run = start("--output-dir", tmp_path / "out")
    for step in range(1, 6):
        run.log(step, {"reward": step}, 5, [])
        common.append_jsonl(run.folder / "samples.jsonl", [{"step": step, "text": "a\u2028b\x85"}] * 2)
    answers = [{"id": "a", "sample": i, "text": "b\u2028", "ids": [1, 2, 3, 4], "prompt_length": 3} for i in range(2)]
    run.evaluated(0, {"s": RESULT | {"samples": answers}})
    state = json.loads(json.dumps(run.state())) | {"wall_s": 100.0}
    run.evaluated(5, {"s": RESULT | {"samples": answers}})
    # killed between the answers of an evaluation and its row: it comes again whole
    common.append_jsonl(run.folder / "eval_samples.jsonl", [{"step": 3, "split": "s", **answers[0]}])
    with open(run.folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 2, "torn')
    again = start("--resume", run.folder, begin=False)
    again.restore(3, state)
    assert [r["step"] for r in read_rows(run.folder / "metrics.jsonl")] == [1, 2, 3]
    assert [r["step"] for r in read_rows(run.folder / "samples.jsonl")] == [1, 1, 2, 2, 3, 3]
    assert read_rows(run.folder / "samples.jsonl")[0]["text"] == "a\u2028b\x85"
    rows = read_rows(run.folder / "eval.jsonl")
    assert [r["step"] for r in rows] == [0] and "samples" not in rows[0]
    kept = read_rows(run.folder / "eval_samples.jsonl")
    assert [(r["step"], r["sample"]) for r in kept] == [(0, 0), (0, 1)] and kept[0]["ids"] == [4]
    assert again.wall_s() >= 100 and list(again.scores["s"]) == ["before"]


def test_a_resumed_run_must_meet_the_same_script_model_and_data(tmp_path, start):
    run = start("--output-dir", tmp_path / "out")
    start("--resume", run.folder)
    for path, change, said in (
            (start.tasks, lambda p: write_rows(p, [problem(5, "?", 1)]), "tasks.jsonl has changed"),
            (tmp_path / "train_thing.py", lambda p: p.write_text("print(2)\n"), "script has changed")):
        before = path.read_bytes()
        change(path)
        with pytest.raises(UserError, match=said):
            start("--resume", run.folder)
        path.write_bytes(before)
    resumed = start("--resume", run.folder, begin=False)
    save_model(tiny_model(seed=9), tmp_path / "other")
    with pytest.raises(UserError, match="model has changed"):
        resumed.start(tmp_path / "other", [start.tasks], torch.device("cpu"), {})
    config = json.loads((run.folder / "config.json").read_text())
    for broken in ({"args": config["args"]}, {**config, "data": [{}]}, {**config, "data": []},
                   {**config, "model": None}):
        (run.folder / "config.json").write_text(json.dumps(broken))
        with pytest.raises(UserError, match="config.json is not the one that the run wrote"):
            start("--resume", run.folder)


def test_curves_of_a_run_without_evaluations_and_of_one_without_steps(tmp_path):
    common.write_curves(tmp_path)
    assert (tmp_path / "curves.csv").read_text().split() == ["step"]
    common.append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5, "x": 1}])
    common.write_curves(tmp_path, tmp_path / "copy.csv")
    assert (tmp_path / "copy.csv").read_text().split() == ["step,loss,x", "1,,", "2,0.5,1"]
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_files_are_written_whole_or_not_at_all(tmp_path):
    common.write_json(tmp_path / "a.json", {"a": float("inf"), "b": "\u00e9"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"a": None, "b": "\u00e9"}
    with pytest.raises(TypeError):
        common.write_json(tmp_path / "a.json", {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and "\u00e9" in (tmp_path / "a.json").read_text("utf-8")


def test_git_state_ignores_the_labbook_and_the_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setenv("NANOPOST_COMMIT", "abc")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert common.git_state() == {"commit": "abc", "dirty": None}   # a copy without its history
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True,
                       capture_output=True)
    git("init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git("add", "a.py")
    git("-c", "commit.gpgsign=false", "commit", "-q", "-m", "one")
    (tmp_path / "labbook.md").write_text("x")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.json").write_text("{}")
    state = common.git_state()
    assert len(state["commit"]) == 12 and state["dirty"] is False
    (tmp_path / "a.py").write_text("2\n")
    assert common.git_state()["dirty"] is True


ENDINGS = [("common.UserError('--lr 0: too small')", 2, "x.py: error: --lr 0: too small\n"),
           ("common.RunError('the loss is nan')", 1, "x.py: error: the loss is nan\n"),
           ("OSError(28, 'No space left on device')", 1, "x.py: error: the disk is full"),
           ("OSError(2, 'two\\nlines')", 1, "x.py: error: [Errno 2] two lines\n"),
           ("KeyboardInterrupt()", 130, "x.py: error: interrupted\n"),
           ("ZeroDivisionError('a bug')", 1, "Traceback")]


def test_what_reaches_the_top_is_one_line_and_an_exit_code(tmp_path):
    """One process that forks for each error: importing torch takes longer than the rest of the test."""
    (tmp_path / "x.py").write_text(f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
import common
for i, error in enumerate([{", ".join(e for e, _, _ in ENDINGS)}]):
    child = os.fork()
    if not child:
        os.dup2(os.open({str(tmp_path)!r} + f"/err{{i}}", os.O_WRONLY | os.O_CREAT), 2)
        common.fail_in_one_line()
        raise error
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    r = subprocess.run([sys.executable, str(tmp_path / "x.py")], capture_output=True, text=True, env=script_env())
    assert r.stdout.split() == [str(code) for _, code, _ in ENDINGS] and r.stderr == ""
    for i, (_, _, said) in enumerate(ENDINGS):
        err = (tmp_path / f"err{i}").read_text()
        assert err.startswith(said) and (err.count("\n") == 1 or said == "Traceback")   # a bug shows all of itself


def test_devices_and_precisions():
    with pytest.raises(UserError, match="--device nonsense: not available"):
        common.pick_device("nonsense")
    cpu = common.pick_device("cpu")
    assert common.pick_precision("auto", cpu) == torch.float32 and common.pick_precision("bf16", cpu) == torch.bfloat16
    assert common.pick_precision("auto", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_final_json_that_is_no_record_is_named_at_a_resume(text, tmp_path):
    (tmp_path / "final.json").write_text(text)
    with pytest.raises(UserError, match="final.json: not the record of a run"):
        common.Run.resumes_at(SimpleNamespace(folder=tmp_path), STATE, 2)


STATE = {"step": 1, "run": {"budget": {}, "wall_s": 1.0, "scores": {}}}


@pytest.mark.parametrize("change", [{"step": -1}, {"step": 2.5}, {"step": "2"}, {"step": None}, {"run": None},
                                    {"run": {}}])
def test_a_state_that_no_run_leaves_is_refused_before_anything_is_written(change, tmp_path):
    with pytest.raises(UserError, match="resume.pt is not whole"):
        common.Run.resumes_at(SimpleNamespace(folder=tmp_path), {**STATE, **change}, 2)
    assert common.Run.resumes_at(SimpleNamespace(folder=tmp_path), STATE, 2) == 1


@pytest.mark.parametrize("name", common.STEP_FILES)
def test_a_row_that_is_none_is_named_at_a_resume(name, tmp_path):
    (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n{"ste')   # a torn last row is cut off by the resume
    assert common.Run.resumes_at(SimpleNamespace(folder=tmp_path), STATE, 2) == 1
    for row in ("nonsense", "[]", '{"loss": 1}', '{"step": null}'):
        (tmp_path / name).write_text(f'{{"step": 1}}\n{row}\n{{"step": 2}}\n')
        with pytest.raises(UserError, match=f"{name}, line 2 is no row"):
            common.Run.resumes_at(SimpleNamespace(folder=tmp_path), STATE, 2)
