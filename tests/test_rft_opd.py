"""
train_rft.py and train_opd.py: which answer is kept, what the losses are by hand and against an independent reference,
what the teacher sees; then short runs of a tiny model, read from their files.
"""
import ast
import copy
import difflib
import json
import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import EOS, ROOT, problem, tiny_model, tiny_tokenizer, write_rows
from launch import jsonl, metrics, refused, run, start, weights
from safetensors.torch import load_file

import common
import train_opd as opd
import train_rft as rft
import train_sft as sft
from model import load_model

torch.set_num_threads(1)
T = torch.tensor


# ----------------------------------------------------------------------------------------------------------------------
# RFT: which answer is kept (X30)

def test_the_shortest_right_answer_is_kept_and_the_first_of_equals():
    right = T([[False, True, True, True], [True, False, True, True], [False] * 4, [True, True, True, True]])
    length = T([[2, 7, 5, 5], [9, 1, 9, 9], [1, 2, 3, 4], [4, 3, 3, 8]])
    played = SimpleNamespace(right=right, length=length)
    kept = rft.keep_first(rft.shortest_first(played, None), right)
    assert kept.int().tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]


def test_a_random_right_answer_is_any_of_them_alike():
    right = T([[True, False, True, True], [False, False, True, False], [False] * 4])
    played = SimpleNamespace(right=right, length=T([[1, 2, 3, 4]] * 3))
    draws = [rft.keep_first(rft.any_order(played, np.random.default_rng([0, step, 1])), right) for step in range(600)]
    assert all(torch.equal(d.sum(1), T([1, 1, 0])) and not (d & ~right).any() for d in draws)
    often = torch.stack(draws).float().mean(0)
    assert (often[0, [0, 2, 3]] - 1 / 3).abs().max() < 4 * math.sqrt(2 / 9 / 600) and often[1, 2] == 1
    again = rft.keep_first(rft.any_order(played, np.random.default_rng([0, 5, 1])), right)
    assert torch.equal(again, draws[5])


# ----------------------------------------------------------------------------------------------------------------------
# Losses

def rows_of(lengths, prompt=3, vocab=261):
    """Random rows as (prompt ids, completion ids)."""
    gen = torch.Generator().manual_seed(5)
    return [(torch.randint(5, vocab, (prompt,), generator=gen).tolist(),
             torch.randint(5, vocab, (n,), generator=gen).tolist()) for n in lengths]


def gradient(model, batch, fn, tokens=10 ** 6, chunk=None, full=False, temperature=1.0):
    """The gradient of the weights (one vector) and the summed metrics, through the script's own chunks."""
    ids, mask, length = batch
    model.zero_grad(set_to_none=True)
    sums = {}
    for group in common.micro_batches(length, range(len(length)), tokens):
        p = common.pack_rows(ids, mask, length, group, model.device)
        hidden = model(p.ids, p.lengths)[p.where]
        grad, part = common.head_backward(hidden, model.head_weight, p.targets, lambda *x: fn(p, *x), temperature,
                                          full=full, chunk=chunk)
        hidden.backward(grad)
        sums = {k: sums.get(k, 0) + float(v) for k, v in part.items()}
    return torch.cat([q.grad.flatten() for q in model.parameters()]), sums


def places(p, kept):
    """As the loop makes them: every answer of the batch is kept."""
    P = len(p.targets)
    return rft.Places(adv=torch.ones(P), weight=torch.full((P,), 1 / kept), sampler=torch.zeros(P))


def test_rft_without_a_brake_is_sft_up_to_the_denominator():
    """SFT divides by the step's answer tokens, RFT by its kept answers; beta 0 in the braked loss changes nothing."""
    batch = sft.as_batch(rows_of([4, 1, 6]))
    model, other = tiny_model(scale=4.0), tiny_model(seed=9, scale=4.0)
    want, _ = gradient(model, batch, lambda p, logp, entropy, at: sft.sft_loss(logp, entropy, at, 11))
    got, sums = gradient(model, batch, lambda p, logp, entropy, at: rft.rft_loss(logp, at, places(p, 3)))
    assert want.norm() > 0.1 and torch.allclose(3 * got, 11 * want, rtol=1e-4, atol=1e-6)
    assert sums["tokens"] == 11
    ids, mask, length = batch
    logp = common.score(model, SimpleNamespace(ids=ids, mask=mask, length=length))[0]
    assert sums["loss"] == pytest.approx(-logp.sum().item() / 3, rel=1e-5)

    def braked(p, z, at):
        with torch.no_grad():
            ref = common.output_logits(other(p.ids, p.lengths)[p.where][at], other.head_weight)
        return rft.rft_loss_exact(z, ref, p.targets[at], at, places(p, 3), 0.0)
    off, sums = gradient(model, batch, braked, full=True)
    assert torch.allclose(off, got, rtol=1e-4, atol=1e-6) and sums["kl"] > 1


def test_brake_by_hand():
    """Two symbols: KL((1/2, 1/2), (3/4, 1/4)) = log 2 - log(3) / 2; 1 of 2 kept answers has the place."""
    logits, ref = T([[0.0, 0.0]]), T([[math.log(3.0), 0.0]])
    b = rft.Places(adv=torch.ones(1), weight=T([0.5]), sampler=T([-1.0]))
    loss, sums = rft.rft_loss_exact(logits, ref, T([1]), slice(None), b, 0.05)
    kl = math.log(2) - math.log(3) / 2
    assert loss.item() == pytest.approx(0.5 * (math.log(2) + 0.05 * kl), rel=1e-5)
    assert sums["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert sums["mismatch"].item() == pytest.approx(1 - math.log(2), rel=1e-5)


def test_kl_of_opd_by_hand_and_its_gradient():
    """d KL(p, q) / dz = p (log p - log q - KL), at each place; the sum over places is divided by the answers."""
    gen = torch.Generator().manual_seed(0)
    z, q = torch.randn(5, 7, generator=gen), torch.randn(5, 7, generator=gen)
    p, gap = z.softmax(-1), z.log_softmax(-1) - q.log_softmax(-1)
    kl = (p * gap).sum(-1, keepdim=True)
    x = z.clone().requires_grad_()
    loss, sums = opd.opd_loss(x, q, T([0, 1, 2, 3, 4]), torch.zeros(5), 4)
    assert loss.item() == pytest.approx(kl.sum().item() / 4, rel=1e-5)
    assert torch.allclose(torch.autograd.grad(loss, x)[0], p * (gap - kl) / 4, atol=1e-6)
    assert sums["entropy"].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-5) and sums["tokens"] == 5
    assert opd.opd_loss(z, z + 3.0, T([0] * 5), torch.zeros(5), 4)[0].abs() < 1e-6   # shifted logits are the same


# ----------------------------------------------------------------------------------------------------------------------
# OPD: what the teacher reads (X31, X32)

HINT = SimpleNamespace(hint="\n(The answer is {}.)")


def test_hint_is_the_final_answer_behind_the_question():
    row = {"id": "a", "answer": "42", "solution": "6 * 7 = 42", "prompt": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]}
    before = copy.deepcopy(row)
    told = opd.final_answer(row, HINT)
    assert told == [{"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "6 * 7?\n(The answer is 42.)"}]
    assert row == before and "6 * 7 = 42" not in json.dumps(told)
    assert opd.final_answer(row, SimpleNamespace(hint="")) == row["prompt"]
    with pytest.raises(common.UserError, match="'b' has no message of the user"):
        opd.final_answer({"id": "b", "answer": 1, "prompt": [{"role": "system", "content": "x"}]}, HINT)


def step_of_two_problems(hint):
    """A rollout of 2 problems x 2 answers (one with text that was not sampled), and the teacher's rows."""
    tokenizer = tiny_tokenizer()
    rows = [problem(0, "1?", 7), problem(1, "what is it?", 123)]
    student = [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]
    gen = torch.Generator().manual_seed(1)
    given = [(student[i // 2], torch.randint(5, 261, (n,), generator=gen).tolist()) for i, n in enumerate([5, 2, 9, 4])]
    ids, mask, length = sft.as_batch(given)
    mask[2, len(student[1]) + 3:len(student[1]) + 5] = False
    r = SimpleNamespace(ids=ids, mask=mask, length=length, prompt_length=T([len(student[i // 2]) for i in range(4)]))
    prompts = [common.encode_prompt(tokenizer, opd.final_answer(row, SimpleNamespace(hint=hint))) for row in rows]
    return r, opd.behind_prompts(r, prompts, 2), student, prompts


def test_teacher_and_student_read_the_same_answer_at_the_same_places():
    r, told, student, prompts = step_of_two_problems(HINT.hint)
    for b in range(4):
        a, t = student[b // 2], prompts[b // 2]
        assert r.ids[b, :len(a)].tolist() == a and told.ids[b, :len(t)].tolist() == t and len(t) > len(a)
        assert r.ids[b, len(a):r.length[b]].tolist() == told.ids[b, len(t):told.length[b]].tolist()
        assert r.mask[b, len(a):r.length[b]].tolist() == told.mask[b, len(t):told.length[b]].tolist()
        assert not told.mask[b, :len(t)].any() and not told.mask[b, told.length[b]:].any()
    p, q = (common.pack_rows(x.ids, x.mask, x.length, [2, 0, 3], torch.device("cpu")) for x in (r, told))
    assert torch.equal(p.targets, q.targets) and torch.equal(p.row, q.row) and len(p.targets) == 5 + 9 - 2 + 4
    text = tiny_tokenizer().decode(told.ids[0, :told.length[0]])
    assert text.startswith("<|user|>1?\n(The answer is 7.)<|end|><|assistant|>")   # the student's template


def opd_gradient(model, teacher, r, told, **how):
    def fn(p, z, at):
        rows = list(dict.fromkeys(p.row.tolist()))
        q = common.pack_rows(told.ids, told.mask, told.length, rows, model.device)
        with torch.no_grad():
            hidden = teacher(q.ids, q.lengths)[q.where]
        return opd.opd_loss(z, common.output_logits(hidden[at], teacher.head_weight) / 0.7, p.targets[at],
                            torch.zeros(len(p.targets))[at], 4)
    return gradient(model, (r.ids, r.mask, r.length), fn, full=True, temperature=0.7, **how)


def test_opd_step_against_autograd_and_for_every_split():
    """Dense logits of both models at once, one backward pass: the same loss and the same gradient as in chunks."""
    model = tiny_model(scale=4.0)
    teacher = copy.deepcopy(model).requires_grad_(False)
    r, told, student, prompts = step_of_two_problems(HINT.hint)
    whole, sums = opd_gradient(model, teacher, r, told)
    for tokens, chunk in [(1, None), (60, 3), (10 ** 6, 1)]:
        part, again = opd_gradient(model, teacher, r, told, tokens=tokens, chunk=chunk)
        assert (part - whole).norm() < 1e-5 * whole.norm() and again["loss"] == pytest.approx(sums["loss"], rel=1e-5)
    model.zero_grad(set_to_none=True)
    loss = 0
    for b in range(4):
        x, y = r.ids[b, :r.length[b]], told.ids[b, :told.length[b]]
        s = (model(x, [len(x)]) @ model.head_weight.t() / 0.7).log_softmax(-1)[len(student[b // 2]) - 1:-1]
        t = (teacher(y, [len(y)]) @ teacher.head_weight.t() / 0.7).log_softmax(-1)[len(prompts[b // 2]) - 1:-1]
        trained = r.mask[b, len(student[b // 2]):r.length[b]]
        loss = loss + (s.exp() * (s - t)).sum(-1)[trained].sum() / 4
    loss.backward()
    want = torch.cat([q.grad.flatten() for q in model.parameters()])
    assert sums["loss"] == pytest.approx(loss.item(), rel=1e-4) and loss.item() > 1e-3
    assert (want - whole).norm() < 1e-4 * want.norm()


def digest(model):
    return [p.detach().clone() for p in model.parameters()]


def test_teacher_stays_and_has_no_gradient_and_student_moves():
    model = tiny_model(scale=4.0)
    teacher = copy.deepcopy(model).requires_grad_(False)
    before, optimizer = digest(teacher), common.make_optimizer(model, 1e-3)
    r, told, *_ = step_of_two_problems(HINT.hint)
    opd_gradient(model, teacher, r, told)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, digest(teacher)))
    assert all(p.grad is None for p in teacher.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, digest(model)))


def test_empty_hint_has_loss_0_at_the_start_and_a_gradient_of_0():
    model = tiny_model(scale=4.0)
    r, told, *_ = step_of_two_problems("")
    assert torch.equal(r.ids, told.ids) and torch.equal(r.mask, told.mask)
    grad, sums = opd_gradient(model, copy.deepcopy(model).requires_grad_(False), r, told)
    assert abs(sums["loss"]) < 1e-6 and grad.norm() < 1e-4


# ----------------------------------------------------------------------------------------------------------------------
# Runs

def tiny_run(script, folder, guesser, tasks, *flags, steps=2):
    got = run(script, "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", "24", "--eval-n", 0,
              "--warmup", 0, "--prompts-per-step", 4, "--max-steps", steps, "--labbook", folder.parent / "labbook.md",
              "--output-dir", folder, *flags)
    assert got.returncode == 0, got.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def shortest(guesser, tasks, tmp_path_factory):
    return tiny_run("train_rft.py", tmp_path_factory.mktemp("rft") / "run", guesser, tasks, steps=3)


@pytest.fixture(scope="module")
def distilled(guesser, tasks, tmp_path_factory):
    return tiny_run("train_opd.py", tmp_path_factory.mktemp("opd") / "run", guesser, tasks)


@pytest.fixture(scope="module")
def braked_twice(guesser, tasks, tmp_path_factory):
    """Two updates on one rollout: at the second, which metrics.jsonl shows, the policy has left its start."""
    return tiny_run("train_rft.py", tmp_path_factory.mktemp("twice") / "run", guesser, tasks, "--arm",
                    "rft_shortest_braked", "--beta", 1, "--updates-per-rollout", 2)


def trained(folder):
    return json.loads((folder / "final.json").read_text())["budget"]["tokens_trained"]


def numbered(rows):
    """Whether the rows of samples.jsonl are 8 different samples of each problem, with its id."""
    return all(len({r["id"] for r in rows[i:i + 8]}) == 1 and [r["sample"] for r in rows[i:i + 8]] == list(range(8))
               for i in range(0, len(rows), 8))


def test_rft_trains_on_the_shortest_right_answers_and_counts_the_skipped(shortest):
    rows, steps = jsonl(shortest / "samples.jsonl"), metrics(shortest)
    assert numbered(rows) and len(rows) == 3 * 32 and [s["step"] for s in steps] == [1, 2, 3]
    skipped = {1: 0, 2: 0, 3: 0}
    for i in range(0, len(rows), 8):
        group = rows[i:i + 8]
        right = [(sum(r["mask"]), r["sample"]) for r in group if r["right"]]
        assert [r["sample"] for r in group if r["adv"]] == ([min(right)[1]] if right else [])
        skipped[group[0]["step"]] += not right
    assert [s["skipped"] for s in steps] == list(skipped.values()) and sum(skipped.values()) > 0
    assert trained(shortest) == sum(sum(r["mask"]) for r in rows if r["adv"])
    assert all(r["reward"] == float(r["right"]) for r in rows) and all(s["kl"] is None for s in steps)


def test_brake_of_0_is_no_brake_and_the_brake_pulls(shortest, guesser, tasks, tmp_path):
    braked = ["--arm", "rft_shortest_braked"]
    off = tiny_run("train_rft.py", tmp_path / "off", guesser, tasks, *braked, "--beta", 0, steps=3)
    assert metrics(off) == metrics(shortest) and weights(off) == weights(shortest)
    on = tiny_run("train_rft.py", tmp_path / "on", guesser, tasks, *braked, steps=3)
    first, *later = [s["kl"] for s in metrics(on)]
    assert abs(first) < 1e-6 and all(k > 1e-5 for k in later) and weights(on) != weights(shortest)
    same = jsonl(shortest / "samples.jsonl")[:32]   # of the first step: nothing else differs
    assert jsonl(on / "samples.jsonl")[:32] == same and trained(on) > 0


def test_step_without_a_right_answer_changes_nothing(guesser, tasks, tmp_path):
    for i, split in enumerate(("train", "heldout-same", "heldout-different")):
        write_rows(tmp_path / f"{split}.jsonl", [problem(j, f"{j}?", 7) for j in range(8 * i, 8 * i + 8)])
    folder = tiny_run("train_rft.py", tmp_path / "run", guesser, tmp_path)
    assert [(s["skipped"], s["reward"], s["loss"]) for s in metrics(folder)] == [(4, 0.0, 0.0)] * 2
    before, after = load_file(guesser / "model.safetensors"), load_file(folder / "checkpoint" / "model.safetensors")
    assert all(torch.equal(before[k], after[k]) for k in before) and trained(folder) == 0


def test_loss_of_an_rft_run_is_divided_by_the_answers_that_it_kept(shortest, guesser):
    """The first step again, from the samples on disk and the weights that it began with."""
    kept = [r for r in jsonl(shortest / "samples.jsonl") if r["step"] == 1 and r["adv"]]
    ids, mask, length = sft.as_batch([(r["ids"][:r["prompt_length"]], r["ids"][r["prompt_length"]:]) for r in kept])
    logp = common.score(load_model(guesser), SimpleNamespace(ids=ids, mask=mask, length=length))[0]
    assert metrics(shortest)[0]["loss"] == pytest.approx(-logp.sum().item() / len(kept), rel=1e-4)
    assert 1 < len(kept) < 4   # of 4 problems


@pytest.mark.slow
def test_rft_random_keeps_other_answers(shortest, guesser, tasks, tmp_path):
    folder = tiny_run("train_rft.py", tmp_path / "run", guesser, tasks, "--arm", "rft_random", steps=3)
    rows, other = jsonl(folder / "samples.jsonl"), jsonl(shortest / "samples.jsonl")
    assert [r["ids"] for r in rows[:32]] == [r["ids"] for r in other[:32]]
    assert [r["adv"] for r in rows[:32]] != [r["adv"] for r in other[:32]]
    assert all(r["right"] for r in rows if r["adv"])
    again = tiny_run("train_rft.py", tmp_path / "again", guesser, tasks, "--arm", "rft_random", steps=3)
    assert weights(again) == weights(folder)


def test_a_brake_for_another_arm_is_refused(tmp_path):
    refused(run("train_rft.py", "--arm", "rft_random", "--beta", "0.1"), "--beta", "rft_shortest_braked", "rft_random")


def test_opd_trains_on_every_sampled_token(distilled, guesser):
    rows, steps = jsonl(distilled / "samples.jsonl"), metrics(distilled)
    tokens = [sum(sum(r["mask"]) for r in rows if r["step"] == s) for s in (1, 2)]
    assert trained(distilled) == sum(tokens)
    for s, n in zip(steps, tokens):
        assert s["loss"] == pytest.approx(s["kl"] * n / 32, rel=1e-5) and s["kl"] > 1e-5 and s["entropy"] > 0
        assert s["mismatch"] < 1e-4   # the student's log-probs in this pass are the sampler's
    assert common.sha256_model(distilled / "checkpoint") != common.sha256_model(guesser)
    assert numbered(rows) and (rows[0]["ids"][-1] == EOS or rows[0]["finish"] == "length")


def test_opd_with_an_empty_hint_starts_at_loss_0(distilled, guesser, tasks, tmp_path):
    folder = tiny_run("train_opd.py", tmp_path / "run", guesser, tasks, "--hint", "", "--slots", 5, steps=1)
    assert abs(metrics(folder)[0]["loss"]) < 1e-5 and abs(metrics(folder)[0]["grad_norm"]) < 1e-2
    assert metrics(distilled)[0]["grad_norm"] > 10 * metrics(folder)[0]["grad_norm"]
    assert metrics(folder)[0]["reward"] == metrics(distilled)[0]["reward"]   # the hint is not in the student's prompt


@pytest.mark.parametrize("script, base, rel", [("train_rft.py", "shortest", 1e-5), ("train_opd.py", "distilled", 1e-5),
                                               ("train_rft.py", "braked_twice", 1e-3)])
def test_micro_batch_tokens_change_nothing_but_memory(script, base, rel, guesser, tasks, tmp_path, request):
    """
    X21: a backward pass for each row, and one for all. Adam's first step makes a sign of a gradient's rounding, which
    the second update sees; a denominator of the pass is off by a factor of 2 and more.
    """
    more = {"braked_twice": ["--arm", "rft_shortest_braked", "--beta", 1, "--updates-per-rollout", 2]}.get(base, [])
    split = tiny_run(script, tmp_path / "run", guesser, tasks, *more, "--micro-batch-tokens", 1)
    got, want = metrics(split)[0], metrics(request.getfixturevalue(base))[0]
    for key in ("loss", "grad_norm") if base == "shortest" else ("loss", "grad_norm", "kl"):
        assert got[key] == pytest.approx(want[key], rel=rel) and want[key] > 1e-3, key


@pytest.mark.parametrize("script, more", [("train_rft.py", ["--arm", "rft_shortest_braked"]),
                                          ("train_opd.py", ["--hint", ""])])
def test_the_start_is_read_at_the_temperature_of_sampling(script, more, guesser, tasks, tmp_path):
    """T25: at the first step policy and start have the same weights, and read the same."""
    folder = tiny_run(script, tmp_path / "run", guesser, tasks, *more, "--temperature", 1.5, steps=1)
    first, = metrics(folder)
    assert abs(first["kl"]) < 1e-6 and first["mismatch"] < 1e-4 and trained(folder) > 0


def test_tokens_are_counted_at_each_update(braked_twice, guesser, tasks, tmp_path):
    rows = jsonl(braked_twice / "samples.jsonl")
    assert trained(braked_twice) == 2 * sum(sum(r["mask"]) for r in rows if r["adv"]) > 0
    folder = tiny_run("train_opd.py", tmp_path / "run", guesser, tasks, "--updates-per-rollout", 2)
    assert trained(folder) == 2 * sum(sum(r["mask"]) for r in jsonl(folder / "samples.jsonl"))


POISON = """import runpy, sys
sys.path.insert(0, {root!r})
from engine import Engine
refresh = Engine.refresh
def halved(self):
    refresh(self)
    self.norm = self.norm * 0.5
Engine.refresh = halved
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("script", ["train_rft.py", "train_opd.py"])
def test_a_poisoned_engine_stops_the_run(script, guesser, tasks, tmp_path):
    """D3: a sampler of other weights than the trainer's. train_grpo.py's is in test_optim.py."""
    path = tmp_path / "poisoned.py"
    path.write_text(POISON.format(root=str(ROOT), script=str(ROOT / script)))
    got = run(path, "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", 8, "--eval-n", 0,
              "--prompts-per-step", 2, "--max-steps", 2, "--labbook", tmp_path / "labbook.md", "--output-dir",
              tmp_path / "run")
    refused(got, "step 1: log-probs of sampler and trainer differ by", code=1)
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", [("train_rft.py", ["--arm", "rft_shortest_braked"]), ("train_opd.py", []),
                                           ("train_rft.py", ["--arm", "rft_random"])])
def test_killed_and_resumed_run_is_the_run_that_was_never_stopped(script, flags, guesser, tasks, tmp_path):
    """The frozen copy is the start of the run, not of its resumed part."""
    flags = [*flags, "--save-every", 3]
    whole = tiny_run(script, tmp_path / "whole", guesser, tasks, *flags, steps=10)
    cut = tmp_path / "cut"
    child = start(script, "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", "24", "--eval-n", 0,
                  "--warmup", 0, "--prompts-per-step", 4, "--max-steps", 10, "--labbook", tmp_path / "labbook.md",
                  "--output-dir", cut, *flags)
    child.until(lambda: (cut / "metrics.jsonl").exists() and len(jsonl(cut / "metrics.jsonl")) >= 4)
    child.kill(signal.SIGKILL)
    child.wait()
    got = run(script, "--resume", cut, "--labbook", tmp_path / "labbook.md")
    assert got.returncode == 0, got.stderr
    assert metrics(cut) == metrics(whole) and weights(cut) == weights(whole)
    assert (cut / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


# X28: what both scripts read, and the hint: each changes the weights of a run
EFFECTS = [(script, flag, value) for script in ("train_rft.py", "train_opd.py") for flag, value in [
    ("--updates-per-rollout", 2), ("--temperature", 1.5), ("--prompts-per-step", 3), ("--num-generations", 1),
    ("--max-new", 8), ("--stop", "####"), ("--lr", 1e-2), ("--warmup", 4), ("--schedule", "linear"),
    ("--grad-clip", 0.01), ("--precision", "bf16"), ("--seed", 1)]] + [("train_opd.py", "--hint", "\n(It is {}.)")]


@pytest.mark.slow
@pytest.mark.parametrize("script, flag, value", EFFECTS)
def test_flags_of_the_copies_change_the_weights(script, flag, value, shortest, distilled, guesser, tasks, tmp_path):
    plain = {"train_rft.py": shortest, "train_opd.py": distilled}[script]
    steps = len(metrics(plain)) // 2 * 2 if flag == "--updates-per-rollout" else len(metrics(plain))
    folder = tiny_run(script, tmp_path / "run", guesser, tasks, flag, value, steps=steps)
    assert weights(folder) != weights(plain)


def test_copies_stay_close_to_train_grpo():
    """A reader who knows train_grpo.py reads the rest as a diff; docstring and blank lines apart."""
    def lines(name):
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        body = text.split("\n")[ast.parse(text).body[0].end_lineno:]
        return [line for line in body if line.strip()]
    for name, most in [("train_rft", 120), ("train_opd", 160)]:
        a, b = lines("train_grpo"), lines(name)
        blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        changed = [(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal"]
        assert sum(max(x) for x in changed) < most, name       # a line that is replaced counts once
        assert sum(new for _, new in changed) < 80, name       # what is new to read
