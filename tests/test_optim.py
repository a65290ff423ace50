"""
The optimizers of --optim (X33, X41), the check that the sampler has the current weights (D3), and the choice of
recomputing layers by the memory at hand; the prediction of memory, and what is said where it runs out (A12, D7).
"""
import copy
import io
import re
import runpy
import signal
import sys
import types

import helpers
import launch
import pytest
import torch

import common
from bench import SHAPES
from common import RunError, UserError
from engine import Engine
from model import Config, Transformer
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
    with pytest.raises(UserError, match="adamw8bit: the package bitsandbytes is not installed") as e:
        common.make_optimizer(Weights(FP32, 8), 1e-6, optim="adamw8bit")
    for optim in ("adamw-sr", "adamw8bit"):   # the two figures of the advice: weight, gradient and moments
        size = common.OPTIMS[optim][1] + torch.empty(0, dtype=common.weight_dtype(optim)).element_size()
        assert re.search(rf"\b{size}( bytes a weight|$)", str(e.value))


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
    b = Places(adv=ones, weight=ones, sampler=common.at_places(r.logp, p))
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
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
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


def room(monkeypatch, tmp_path, free, optim="adamw", slots=0, micro=16384, **sizes):
    model = helpers.tiny_model(hidden_size=128, intermediate_size=512, num_hidden_layers=8, head_dim=32, **sizes)
    args = types.SimpleNamespace(micro_batch_tokens=micro, keep=1, max_steps=1, optim=optim)
    run = types.SimpleNamespace(args=args, folder=tmp_path, remark="")
    run.note = types.MethodType(common.Run.note, run)
    monkeypatch.setattr(common, "memory_free", lambda device: (free, free))
    common.check_room(run, model, row_tokens=256, rows_a_step=64, slots=slots)
    return model, run


def test_layers_are_recomputed_where_memory_is_short_and_the_record_says_so(monkeypatch, tmp_path, capsys):
    whole = 16384 * 8 * common.layer_bytes(helpers.tiny_model(hidden_size=128, intermediate_size=512, head_dim=32))
    model, run = room(monkeypatch, tmp_path, 2 * whole)
    assert not model.checkpointing and not run.remark
    model, run = room(monkeypatch, tmp_path, whole // 2)
    assert model.checkpointing and "recomputed" in run.remark and run.remark in capsys.readouterr().out
    with pytest.raises(UserError, match="--micro-batch-tokens 16384 is too much, [0-9]+ would fit"):
        room(monkeypatch, tmp_path, whole // 8)


def test_a_cache_that_is_too_large_is_named_with_a_number_of_slots_that_fits(monkeypatch, tmp_path):
    free = 2 ** 29   # a slot of 256 tokens takes 1 MiB, and 4,096 were asked for
    with pytest.raises(UserError, match="--slots 4096 is too much, .* would fit with --micro-batch-tokens 256$") as e:
        room(monkeypatch, tmp_path, free, slots=4096)
    fits = int(re.search("([0-9]+) would fit", str(e.value))[1])
    assert 400 < fits < 512
    room(monkeypatch, tmp_path, free, slots=fits, micro=256)
    with pytest.raises(UserError, match="even one row of 256 tokens does not fit: take a smaller model"):
        room(monkeypatch, tmp_path, 2 ** 24, slots=4096)


class Kernels:
    """In place of fused.py, where only the prediction asks for it."""


#            layout          optim       micro   slots  free, GiB  peak on an H200, GiB
MEASURED = [("for speed",    "adamw",    31428,  64,    1000,      97.69),
            ("bf16 weights", "adamw-sr", 16384,  64,    1000,      48.66),
            ("for memory",   "adamw-sr", 4096,   32,    15,        14.58)]


@pytest.mark.parametrize("name, optim, micro, slots, free, peak", MEASURED)
def test_the_prediction_is_near_what_a_gpu_took(name, optim, micro, slots, free, peak, monkeypatch, tmp_path, capsys):
    """Full-parameter GRPO of the 1.5B shape, 8 x 8 rows of 128 + 1,024 tokens: labbook bench-memory-261129-200045."""
    with torch.device("meta"):
        model = Transformer(Config.from_dict(SHAPES["1.5b"])).to(common.weight_dtype(optim))
    model.compute_dtype = BF16
    monkeypatch.setattr(Transformer, "kernels", lambda self: Kernels)
    monkeypatch.setattr(common, "chunk_rows", lambda vocab, device: 2 ** 26 // vocab)   # of a GPU
    monkeypatch.setattr(common, "memory_free", lambda device: (free * common.GIB, free * common.GIB))
    args = types.SimpleNamespace(micro_batch_tokens=micro, keep=0, max_steps=0, optim=optim)
    run = types.SimpleNamespace(args=args, folder=tmp_path, remark="")
    run.note = types.MethodType(common.Run.note, run)
    monkeypatch.setattr(common.shutil, "disk_usage", lambda folder: (2 ** 51, 2 ** 50, 2 ** 50))
    common.check_room(run, model, 1152, 64, slots)
    assert model.checkpointing == (name == "for memory")
    weights = model.num_params() * next(model.parameters()).element_size()
    tokens = micro // 1152 * 1152   # whole rows
    assert (weights + run.room["fixed"] + tokens * run.room["a_token"]) / common.GIB == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("free, said", [(8, "lower --keep 5 to 3, or write elsewhere"),
                                        (1, "free at {}; write elsewhere")])
def test_a_disk_that_cannot_hold_the_checkpoints_is_said_before_the_run(free, said, monkeypatch, tmp_path):
    model = helpers.tiny_model()
    checkpoint = 12 * model.num_params()   # weights and two moments in fp32
    args = types.SimpleNamespace(micro_batch_tokens=1024, keep=5, max_steps=0, optim="adamw")
    run = types.SimpleNamespace(args=args, folder=tmp_path, remark="")
    run.note = types.MethodType(common.Run.note, run)
    for checkpoints in (6, free / 2):   # those that are kept, and one more while it is written
        monkeypatch.setattr(common.shutil, "disk_usage", lambda folder: (2 ** 40, 0, int(checkpoints * checkpoint)))
        if checkpoints == 6:
            common.check_room(run, model, 64, 4, 4)
            continue
        with pytest.raises(UserError) as e:
            common.check_room(run, model, 64, 4, 4)
        assert said.format(tmp_path) in str(e.value) and "of 1024.00 GiB" in str(e.value)
    for i in range(5):   # a resumed run has its checkpoints already, but for the one that is written beside them
        (tmp_path / f"checkpoint-{i}").mkdir()
    monkeypatch.setattr(common.shutil, "disk_usage", lambda folder: (2 ** 40, 0, checkpoint))
    common.check_room(run, model, 64, 4, 4)
    run.args.resume = str(tmp_path)
    monkeypatch.setattr(common.shutil, "disk_usage", lambda folder: (2 ** 40, 0, 0))
    with pytest.raises(UserError, match=r"lower --keep 5 to 4$"):
        common.check_room(run, model, 64, 4, 4)


def test_the_room_counts_what_the_optimizer_keeps(monkeypatch, tmp_path):
    fixed = {optim: room(monkeypatch, tmp_path, 2 ** 40, optim)[1].room["fixed"] for optim in common.OPTIMS}
    params = helpers.tiny_model(hidden_size=128, intermediate_size=512, num_hidden_layers=8, head_dim=32).num_params()
    assert fixed["adamw"] - fixed["adamw-sr"] == 6 * params


# ----------------------------------------------------------------------------------------------------------------------
# Row A12: memory that runs out all the same is one line

def advice(monkeypatch, error, file="train_grpo.py", run=None, args=None):
    """memory_advice for an error that was raised in `file`, on a device of 20 GiB with 1 GiB free."""
    monkeypatch.setattr(common, "memory_free", lambda device: (1 * common.GIB, 20 * common.GIB))
    try:
        exec(compile("raise error", file, "exec"), {"error": error.with_traceback(None)})
    except (RuntimeError, MemoryError) as e:
        assert common.out_of_memory(e)
        return common.memory_advice(e, e.__traceback__, run, args)


CUDA_OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 is full.")
CPU_OOM = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096000 bytes.")


def test_an_error_of_memory_names_the_flag_and_a_value_that_would_fit(monkeypatch):
    args = types.SimpleNamespace(micro_batch_tokens=16384, slots=64)
    # of 20 GiB that were free 18 may be filled; 8 are fixed, 4 of them the cache of 64 slots; a token takes 2 MiB
    gib = common.GIB
    room = {"fixed": 8 * gib, "a_token": 2 ** 21, "a_slot": gib / 16, "slots": 64, "free": 20 * gib}
    run = types.SimpleNamespace(args=args, room=room)
    said = "out of memory: asked for 2.50 GiB, 19.0 GiB in use of 20.0; lower --"
    assert advice(monkeypatch, CUDA_OOM, run=run) == f"{said}micro-batch-tokens 16384 (5120 would fit)"
    # 14 GiB would hold the cache of 224 slots, but 64 did not fit: half of them
    assert advice(monkeypatch, CUDA_OOM, "engine.py", run) == f"{said}slots 64 (32 would fit)"
    room["a_slot"], room["fixed"] = gib, 74 * gib   # 10 are fixed beside the cache: 8 slots
    assert advice(monkeypatch, CUDA_OOM, "engine.py", run) == f"{said}slots 64 (8 would fit)"
    assert advice(monkeypatch, CUDA_OOM, run=run).endswith("or take a smaller model: not even 1 is sure to fit")


def test_an_error_of_memory_without_a_prediction(monkeypatch):
    assert advice(monkeypatch, CPU_OOM) == "out of memory: asked for 4096000 bytes, 19.0 GiB in use of 20.0"
    assert advice(monkeypatch, MemoryError(), "engine.py", args=types.SimpleNamespace(slots=64)).endswith(
        "asked for more, 19.0 GiB in use of 20.0; lower --slots 64 (32 halves what it takes)")


@pytest.mark.parametrize("script", ["train_grpo.py", "eval_passk.py"])
def test_a_run_that_meets_it_ends_in_one_line_and_a_record(script, guesser, tasks, tmp_path):
    """The engine is told to fail as CUDA does; the rest is a command like any other."""
    (tmp_path / "sitecustomize.py").write_text("")
    fails = tmp_path / script
    fails.write_text(f"""import runpy, sys
sys.path.insert(0, {str(helpers.ROOT)!r})
import engine, torch
def decode(self, *more):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
engine.Engine.decode = decode
runpy.run_path({str(helpers.ROOT / script)!r}, run_name="__main__")
""")
    more = ["--lr", "1e-3", "--output-dir", tmp_path / "run", "--max-steps", 1, "--eval-n", 0]
    got = launch.run(fails, "--model", guesser, "--tasks-dir", tasks, "--max-new", 8, "--labbook", tmp_path / "lb.md",
                     *(more if script == "train_grpo.py" else ["--n", 2]))
    assert got.returncode == 1 and len(got.stderr.splitlines()) == 1, got.stderr
    assert "out of memory: asked for 2.50 GiB" in got.stderr and "--slots 64 (32 " in got.stderr
    if script == "train_grpo.py":
        last = common.read_labbook(tmp_path / "lb.md")[0][-1]
        assert (last["kind"], last["status"]) == ("run", "failed") and "out of memory" in last["notes"]
