"""
The optimizers of --optim (X33, X41), the check that the sampler has the current weights (D3), and the choice of
recomputing layers by the memory at hand.
"""
import copy
import io
import runpy
import signal
import sys
import types

import helpers
import pytest
import torch

import common
from common import RunError, UserError
from engine import Engine
from train_grpo import Places, grpo_loss

BF16, FP32 = torch.bfloat16, torch.float32


class Weights(torch.nn.Module):
    """One matrix of N(0, 0.02), all of it numbers that bf16 can hold."""

    def __init__(self, dtype, size=2 ** 17, device="cpu"):
        super().__init__()
        w = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(BF16)
        self.w = torch.nn.Parameter(w.to(device, dtype))
        self.device = torch.device(device)


def gradients(steps, size=2 ** 17):
    """A lasting part and noise of the same size, as bf16 numbers, so that every optimizer sees the same."""
    gen = torch.Generator().manual_seed(1)
    lasting = torch.randn(size, generator=gen)
    for _ in range(steps):
        yield (1e-3 * (lasting + torch.randn(size, generator=gen))).to(BF16)


def change(model, optimizer, steps=100):
    start = model.w.detach().float().clone()
    for g in gradients(steps):
        model.w.grad = g.to(model.w.device, model.w.dtype)
        optimizer.step()
    return (model.w.detach().float() - start).cpu()


def slope(x, reference):
    return float((x @ reference) / (reference @ reference))


@pytest.fixture(scope="module")
def reference():
    model = Weights(FP32)
    return change(model, common.make_optimizer(model, 1e-6))


# ----------------------------------------------------------------------------------------------------------------------
# X33: small updates arrive

def test_plain_bf16_loses_nearly_every_update(reference):
    model = Weights(BF16)
    assert 0.0 < slope(change(model, torch.optim.AdamW(model.parameters(), 1e-6, (0.9, 0.99), weight_decay=0.0)),
                       reference) < 0.1


def test_stochastic_rounding_applies_the_update_of_fp32(reference):
    model = Weights(common.weight_dtype("adamw-sr"))
    assert model.w.dtype == BF16
    optimizer = common.make_optimizer(model, 1e-6, optim="adamw-sr")
    assert 0.95 < slope(change(model, optimizer), reference) < 1.05
    assert {x.dtype for x in optimizer.state[model.w].values()} == {BF16}   # 8 bytes a weight with its gradient


def test_8_bit_adamw_applies_the_update_of_fp32(reference):
    pytest.importorskip("bitsandbytes", reason="needs package bitsandbytes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Weights(common.weight_dtype("adamw8bit"), device=device)
    assert 0.95 < slope(change(model, common.make_optimizer(model, 1e-6, optim="adamw8bit")), reference) < 1.05


def test_a_missing_package_is_one_line_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="adamw8bit: the package bitsandbytes is not installed"):
        common.make_optimizer(Weights(FP32, 8), 1e-6, optim="adamw8bit")


def test_large_steps_and_decay_are_those_of_adamw():
    """Where steps are large against bf16's spacing, the weights themselves agree, decay and bias correction too."""
    ours, theirs = Weights(BF16), Weights(FP32)
    a = change(ours, common.make_optimizer(ours, 1e-2, 0.5, "adamw-sr"), steps=5)
    b = change(theirs, common.make_optimizer(theirs, 1e-2, 0.5), steps=5)
    assert (a - b).abs().max() < 4e-3 and slope(a, b) == pytest.approx(1, abs=2e-3)


def test_rounding_is_to_a_neighbour_and_right_on_average():
    x = torch.tensor([1 + 2 ** -9, -(1 + 2 ** -9), 0.3, 1.0, 0.0]).repeat(20000, 1)   # 1 + 2^-9: a quarter of the way
    out = torch.empty_like(x, dtype=BF16)
    common.round_stochastically(x, out, torch.Generator().manual_seed(0))
    up, down = 1 + 2 ** -7, 1.0
    assert set(out[:, 0].tolist()) == {down, up} and set(out[:, 1].tolist()) == {-down, -up}
    assert (out[:, 0] == up).float().mean() == pytest.approx(0.25, abs=0.02)
    assert torch.allclose(out.float().mean(0), x[0], rtol=3e-4)
    assert (out[:, 3:] == x[:, 3:]).all()   # what bf16 can hold stays as it is


# ----------------------------------------------------------------------------------------------------------------------
# X41: a run and its resumed twin have the same weights

def test_a_resumed_optimizer_goes_on_with_the_same_weights():
    steps = list(gradients(6))

    def go(model, optimizer, steps):
        for g in steps:
            model.w.grad = g.clone()
            optimizer.step()

    whole = Weights(BF16)
    go(whole, common.make_optimizer(whole, 1e-5, optim="adamw-sr", seed=7), steps)
    half = Weights(BF16)
    optimizer = common.make_optimizer(half, 1e-5, optim="adamw-sr", seed=7)
    go(half, optimizer, steps[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = Weights(BF16)
    with torch.no_grad():
        again.w.copy_(half.w)
    optimizer = common.make_optimizer(again, 1e-5, optim="adamw-sr", seed=0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    go(again, optimizer, steps[3:])
    assert torch.equal(again.w, whole.w)
    other = Weights(BF16)
    go(other, common.make_optimizer(other, 1e-5, optim="adamw-sr", seed=8), steps)
    assert not torch.equal(other.w, whole.w)


@pytest.mark.slow
def test_a_resumed_run_with_bf16_weights_ends_where_the_whole_one_does(guesser, tasks, tmp_path):
    args = ["--model", guesser, "--tasks-dir", tasks, "--optim", "adamw-sr", "--lr", "1e-3", "--prompts-per-step", 4,
            "--num-generations", 4, "--max-new", 12, "--eval-n", 0, "--save-every", 2, "--labbook", tmp_path / "lb.md"]
    done = helpers.run_script("train_grpo.py", *args, "--max-steps", 4, "--output-dir", tmp_path / "whole")
    assert done.returncode == 0 and common.OPTIMS["adamw-sr"][0] in done.stdout, done.stderr
    first = helpers.run_script("train_grpo.py", *args, "--max-steps", 2, "--output-dir", tmp_path / "half")
    assert first.returncode == 0, first.stderr
    second = helpers.run_script("train_grpo.py", "--resume", tmp_path / "half", "--max-steps", 4)
    assert second.returncode == 0, second.stderr
    a, b = ((tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("whole", "half"))
    assert a == b


# ----------------------------------------------------------------------------------------------------------------------
# D3, X34: the sampler has the trainer's weights, and a run stops where it has not

def check(step, model, engine, trained=True):
    """The canary on a fresh rollout, with the sums of a training step."""
    r = engine.generate([[5, 6, 7], [8, 9]], 4, max_new=12, eos_ids=())
    p = common.pack_rows(r.ids, r.mask, r.length, range(8), model.device)
    ones = torch.ones(len(p.targets))
    b = Places(adv=ones, weight=ones, sampler=common.at(r.logp, p))
    args = types.SimpleNamespace(eps=0.2)
    with torch.no_grad():
        hidden = model(p.ids, p.lengths)[p.where]
    sums = common.head_backward(hidden, model.head_weight, p.targets, lambda lp, ent, at: grpo_loss(lp, at, b, args))[1]
    model.zero_grad()
    common.check_sampler(step, sums if trained else {}, model, r)


@pytest.mark.parametrize("optim, compute", [("adamw", FP32), ("adamw", BF16), ("adamw-sr", BF16)])
def test_a_sampler_with_old_weights_stops_the_run(optim, compute):
    model = helpers.tiny_model(scale=4.0).to(common.weight_dtype(optim))
    model.compute_dtype = compute
    engine, stale = Engine(model), Engine(copy.deepcopy(model))
    check(1, model, engine)
    check(1, model, stale)
    optimizer = common.make_optimizer(model, 0.05, optim=optim)
    hidden = model(torch.arange(5, 25), [20])
    hidden.float().square().sum().backward()
    optimizer.step()
    check(2, model, engine)   # in place: the engine sees it without a sync
    check(2, model, engine, trained=False)
    for trained in (True, False):   # also where no answer gave a gradient
        with pytest.raises(RunError, match=r"step 2: log-probs of sampler and trainer differ by \d"):
            check(2, model, stale, trained)


def test_a_poisoned_engine_stops_the_training_script(guesser, tasks, tmp_path, monkeypatch):
    refresh = Engine.refresh

    def poisoned(self):
        refresh(self)
        self.norm = self.norm * 0.5

    args = ["train_grpo.py", "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--prompts-per-step", "2",
            "--num-generations", "2", "--max-new", "8", "--eval-n", "0", "--output-dir", tmp_path / "run",
            "--labbook", tmp_path / "lb.md", "--max-steps", "3"]
    monkeypatch.setattr(Engine, "refresh", poisoned)
    monkeypatch.setattr(sys, "argv", [str(a) for a in args])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)   # the script sets it and two signals: put back after
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(RunError, match=r"step 1: log-probs of sampler and trainer differ by \d"):
            runpy.run_path(str(helpers.ROOT / "train_grpo.py"), run_name="__main__")
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


# ----------------------------------------------------------------------------------------------------------------------
# Memory: layers are recomputed where the activations would not fit, before the run is refused

def saved_bytes(model, tokens):
    """Bytes of the distinct tensors, weights apart, that a forward pass keeps for the backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def pack(t):
        held[t.untyped_storage().data_ptr()] = t   # the tensor itself, or its place could be given to another
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.randint(5, 200, (tokens,), device=model.device), [tokens])
    return sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in weights)


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_the_bytes_of_a_layer_are_those_that_autograd_keeps(compute):
    models = [helpers.tiny_model(hidden_size=64, head_dim=16, intermediate_size=160, num_hidden_layers=n)
              for n in (2, 4)]
    for m in models:
        m.compute_dtype = compute
    kept = [saved_bytes(m, 384) - saved_bytes(m, 128) for m in models]   # what grows with tokens, not with weights
    assert (kept[1] - kept[0]) / (2 * 256) == pytest.approx(common.layer_bytes(models[0]), rel=0.05)


def room(monkeypatch, tmp_path, free, optim="adamw", **sizes):
    model = helpers.tiny_model(hidden_size=128, intermediate_size=512, num_hidden_layers=8, head_dim=32, **sizes)
    args = types.SimpleNamespace(micro_batch_tokens=16384, keep=1, max_steps=1, optim=optim)
    run = types.SimpleNamespace(args=args, folder=tmp_path, remark="")
    monkeypatch.setattr(common, "memory_free", lambda device: (free, free))
    common.check_room(run, model, row_tokens=256, rows_a_step=64)
    return model, run


def test_layers_are_recomputed_where_memory_is_short_and_the_record_says_so(monkeypatch, tmp_path, capsys):
    whole = 16384 * 8 * common.layer_bytes(helpers.tiny_model(hidden_size=128, intermediate_size=512, head_dim=32))
    model, run = room(monkeypatch, tmp_path, 2 * whole)
    assert not model.checkpointing and not run.remark
    model, run = room(monkeypatch, tmp_path, whole // 2)
    assert model.checkpointing and "recomputed" in run.remark and run.remark in capsys.readouterr().out
    with pytest.raises(UserError, match="--micro-batch-tokens 16384 is too much, [0-9]+ would fit"):
        room(monkeypatch, tmp_path, whole // 8)


def test_the_room_counts_what_the_optimizer_keeps(monkeypatch, tmp_path):
    fixed = {optim: room(monkeypatch, tmp_path, 2 ** 40, optim)[1].room["fixed"] for optim in common.OPTIMS}
    params = helpers.tiny_model(hidden_size=128, intermediate_size=512, num_hidden_layers=8, head_dim=32).num_params()
    assert fixed["adamw"] - fixed["adamw-sr"] == 6 * params
