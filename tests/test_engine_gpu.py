"""
The captured decode step on a GPU against the eager one, a CPU and a fresh forward pass, in fp32 (masked attention) and
in bf16 (flash attention over the slot cache).
"""
from types import SimpleNamespace

import pytest
import torch
from test_engine import PROMPTS, TOK, V, rows, train_step

import common
import engine as engine_module
from engine import Engine, key_uniform, sample_tokens
from model import Transformer, add_lora, new_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
BF16, FP32 = torch.bfloat16, torch.float32


def small(kind="llama", heads=6, kv_heads=2, head_dim=64, params=FP32, compute=BF16, seed=0, eos=1):
    raw = {"architectures": [kind.capitalize() + "ForCausalLM"], "vocab_size": V, "hidden_size": 96,
           "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": head_dim,
           "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 1024,
           "tie_word_embeddings": True, "eos_token_id": eos}
    model = new_model(raw, seed)
    with torch.no_grad():
        gen = torch.Generator().manual_seed(seed + 1)
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6)
            else:
                p.add_(torch.randn(p.shape, generator=gen) * 0.1)
    model = model.to("cuda", params)
    model.compute_dtype = compute
    return model


def gap(model, r, temperature=1.0):
    """Sampler's minus a fresh forward's log-prob of each sampled token."""
    want, entropy = common.score(model, r, temperature)
    at = r.mask[:, 1:]
    assert (r.logp[~at] == 0).all() and (r.logp[at] <= 0).all()
    if r.entropy is not None:
        assert (entropy - r.entropy)[at].abs().mean() < 0.02
    return (want - r.logp)[at]


SHAPES = [("llama", 6, 2, 64), ("llama", 4, 4, 32), ("qwen2", 12, 2, 128), ("qwen3", 8, 1, 64), ("qwen2", 7, 1, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_graph_equals_cpu_and_forward(shape):
    model = small(*shape, compute=FP32)
    r = Engine(model, slots=40).generate(PROMPTS, 12, max_new=40, seed=1, entropy=True)
    assert gap(model, r).abs().max() < 1e-4
    cpu = Engine(small(*shape, compute=FP32).cpu()).generate(PROMPTS, 12, max_new=40, seed=1, entropy=True)
    # the same uniform numbers: a token differs only where rounding meets a border of the CDF
    same = sum(a == b for a, b in zip(rows(r), rows(cpu)))
    assert same >= 46
    for i in range(48):
        if r.ids[i].tolist()[:r.length[i]] == cpu.ids[i].tolist()[:cpu.length[i]]:
            n = int(r.length[i])
            assert torch.allclose(r.logp[i, :n - 1], cpu.logp[i, :n - 1], atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_bf16_sampler_and_trainer_agree(shape, temperature):
    model = small(*shape)
    e = Engine(model, slots=64)
    assert e.flash   # torch 2.11 and later have it for this GPU; a torch without it would be slow, not wrong
    g = gap(model, e.generate(PROMPTS, 32, max_new=60, seed=2, temperature=temperature, entropy=True), temperature)
    assert g.abs().mean() < 0.02 and abs(g.exp().mean() - 1) < 0.01


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_graph_equals_eager(compute, monkeypatch):
    model = small(compute=compute)
    a = Engine(model, slots=24).generate(PROMPTS, 8, max_new=50, seed=3)

    class Eager:
        def __init__(self, e, rows, *settings):
            self.args = e, rows, settings

        def replay(self):
            e, rows, settings = self.args
            e.decode(rows, e.kv.shape[4], e.counter, *settings)
            e.counter += 1
    monkeypatch.setattr(Engine, "graph", lambda e, *args: Eager(e, *args))
    b = Engine(model, slots=24).generate(PROMPTS, 8, max_new=50, seed=3)
    assert rows(a) == rows(b) and torch.allclose(a.logp, b.logp, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_kernels_flash_and_masked_attention_are_near_fp32(shape, monkeypatch):
    """One model, three paths; teacher-forced through the prompts, so that no sampled token hides a difference."""
    prompts = [[(7 * i + 3 * j) % (V - 2) + 2 for j in range(5 + 9 * i)] for i in range(20)]
    exact = small(*shape, compute=FP32)
    for path in ("fused kernels", "flash", "plain"):
        if path == "flash":
            monkeypatch.setattr(engine_module, "load_kernels", lambda: None)
        elif path == "plain":
            monkeypatch.setattr(engine_module, "flash_works", lambda *args: False)
        r = Engine(small(*shape), slots=160).generate(prompts, 8, max_new=2, seed=3, greedy=True, entropy=True)
        if path != "fused kernels" or engine_module.load_kernels():
            assert r.stats["path"] == path
        logp, entropy = common.score(exact, r)
        first = torch.arange(160), r.prompt_length - 1
        assert (r.logp[first] - logp[first]).abs().mean() < 0.02
        assert (r.entropy[first] - entropy[first]).abs().mean() < 0.02


@pytest.mark.parametrize("vocab", [61, 2048, 5000, 49152])
def test_fused_sampler_equals_the_plain_one(vocab):
    kernels = pytest.importorskip("fused", reason="needs package triton")
    rows, slots = 300, 320
    gen = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=gen) * 3).cuda()
    logits[:, : vocab // 3] = float("-inf")
    keys = torch.randint(-2 ** 62, 2 ** 62, (slots,), generator=gen).cuda()
    pos = torch.arange(slots, device="cuda")
    u = key_uniform(keys, pos + 1)[:rows]
    token, logp, entropy = (torch.zeros(4, slots, dtype=d, device="cuda") for d in (torch.int32, FP32, FP32))
    for temperature, greedy in ((1.0, False), (0.7, False), (1.0, True)):
        state = torch.stack((pos, pos, keys))
        kernels.sample(logits, state, torch.tensor([2], device="cuda"), token, logp, entropy, temperature, greedy, 200)
        want = sample_tokens(logits, u, temperature, greedy, True)
        same = want[0] == token[2, :rows]
        assert same.float().mean() >= (1 if greedy else 0.99)   # a border of the CDF may round to either side
        assert torch.allclose(want[1][same], logp[2, :rows][same], atol=1e-5)
        assert torch.allclose(want[2], entropy[2, :rows], atol=1e-4)
        assert torch.equal(state[0, :rows], token[2, :rows]) and (logits.gather(1, state[0, :rows, None]) > -99).all()
        assert torch.equal(state[1, :rows], torch.arange(1, rows + 1, device="cuda").clamp(max=200))


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_batch_layout_and_repeat(compute):
    model = small(compute=compute)
    e = Engine(model, slots=64)
    a, b = (e.generate(PROMPTS, 8, max_new=40, seed=1) for _ in range(2))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.logp, b.logp)   # two passes of equal shape: bit-equal
    few = Engine(model, slots=5).generate(PROMPTS, 8, max_new=40, seed=1)   # refill
    equal = sum(x == y for x, y in zip(rows(a), rows(few)))
    assert equal >= (31 if compute == FP32 else 16)   # in bf16 another row count rounds products otherwise
    assert gap(model, few).abs().mean() < (1e-5 if compute == FP32 else 0.02)
    for i in range(32):
        if compute == FP32 and rows(a)[i] == rows(few)[i]:
            n = int(a.length[i]) - 1
            assert torch.allclose(a.logp[i, :n], few.logp[i, :n], atol=1e-5)


def test_a_row_is_scored_alone_as_in_the_batch():
    model = small(compute=FP32)
    r = Engine(model, slots=40).generate(PROMPTS, 4, max_new=30, seed=1, temperature=1.2)
    whole = common.score(model, r)[0]
    for i in range(0, len(r.ids), 5):
        n = int(r.length[i])
        alone = common.score(model, SimpleNamespace(ids=r.ids[i:i + 1, :n], mask=r.mask[i:i + 1, :n],
                                                    length=r.length[i:i + 1]))[0]
        assert torch.allclose(alone[0], whole[i, :n - 1], atol=1e-5)


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_skewed_lengths_refill_compaction_and_every_bucket(compute):
    model = small(compute=compute, eos=[1, 2])
    e = Engine(model, slots=300)
    r = e.generate(PROMPTS, 150, max_new=120, seed=4, temperature=1.2)
    assert len({k[0] for k in e.graphs}) >= 3 and {"eos", "length"} >= set(r.finish)
    g = gap(model, r, 1.2).abs()
    assert g.max() < 1e-3 if compute == FP32 else g.mean() < 0.02


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_stops_and_injection(compute):
    model = small(compute=compute, eos=0)
    calls = {}

    def on_stop(row, text, stop):
        calls[row] = calls.get(row, 0) + 1
        return [7, 8, 14, 9, 30, 31][:calls[row]] if calls[row] < 6 else None
    e = Engine(model, TOK, slots=20)
    r = e.generate(PROMPTS, 16, max_new=60, seed=4, temperature=1.4, stop=["#", "a", "="], on_stop=on_stop)
    assert r.stats["injected_tokens"] > 100 and "stop" in r.finish
    g = gap(model, r, 1.4).abs()
    assert g.max() < 1e-3 if compute == FP32 else g.mean() < 0.02


@pytest.mark.parametrize("params, compute", [(FP32, FP32), (FP32, BF16), (BF16, BF16)], ids=["fp32", "master", "bf16"])
def test_captured_graphs_see_new_weights(params, compute):
    model = small(params=params, compute=compute)
    e = Engine(model)
    before = e.generate(PROMPTS, 4, max_new=20, greedy=True, eos_ids=())
    graphs = dict(e.graphs)
    torch.set_default_device("cuda")
    try:
        train_step(model, 0.05)
    finally:
        torch.set_default_device("cpu")
    after = e.generate(PROMPTS, 4, max_new=20, greedy=True, eos_ids=())
    assert e.graphs == graphs and (before.logp[:, 8] - after.logp[:, 8]).abs().max() > 0.01
    assert gap(model, after).abs().mean() < (1e-5 if compute == FP32 else 0.02)


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_captured_graphs_see_an_adapter(compute):
    model, bare = small(compute=compute), small(compute=compute)
    add_lora(model, 8, seed=1)
    e = Engine(model)
    before = e.generate(PROMPTS, 4, max_new=20, greedy=True, eos_ids=())
    assert torch.equal(before.ids, Engine(bare).generate(PROMPTS, 4, max_new=20, greedy=True, eos_ids=()).ids)
    graphs = dict(e.graphs)
    torch.set_default_device("cuda")
    try:
        for _ in range(2):   # the first moves B alone
            train_step(model, 0.05)
    finally:
        torch.set_default_device("cpu")
    after = e.generate(PROMPTS, 4, max_new=20, greedy=True, eos_ids=())
    assert e.graphs == graphs and (before.logp[:, 8] - after.logp[:, 8]).abs().max() > 0.01
    assert gap(model, after).abs().mean() < (1e-5 if compute == FP32 else 0.02)
    assert gap(bare, after).abs().mean() > 0.05


# ----------------------------------------------------------------------------------------------------------------------
# The fused learning step: against fp32, and against the plain path in bf16

FUSED = [("llama", 6, 2, 64), ("llama", 4, 4, 32), ("qwen2", 12, 2, 128), ("qwen3", 8, 1, 64), ("qwen2", 3, 3, 64)]
LENGTHS = [200, 1, 37, 300]


def gradients(model, scale=1.0, again=False):
    """Log-probs of made-up targets and the gradient of each parameter, by the chunked head as the scripts take it."""
    gen = torch.Generator().manual_seed(5)
    ids, targets = (torch.randint(2, V, (sum(LENGTHS),), generator=gen).cuda() for _ in range(2))
    g, seen = torch.randn(sum(LENGTHS), generator=gen).cuda() * scale, []
    model.zero_grad(set_to_none=True)
    model.checkpointing = again
    hidden = model(ids, LENGTHS)
    grad, _ = common.head_backward(hidden, model.head_weight, targets, lambda logp, entropy, at: (
        seen.append(logp.detach()) or (logp * g[at]).sum(), {}), chunk=100)
    hidden.backward(grad)
    return torch.cat(seen), {name: p.grad.double() / scale for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", FUSED)
@pytest.mark.parametrize("params", [FP32, BF16])
def test_fused_step_is_nearer_to_fp32_than_the_plain_one(shape, params, monkeypatch):
    pytest.importorskip("triton", reason="needs package triton")
    model = small(*shape, params=params)
    assert model.kernels()
    logp, grads = gradients(model)
    for again in (False, True):
        same_logp, same = gradients(model, again=again)
        assert torch.equal(logp, same_logp)
        assert all(torch.equal(grads[name], same[name]) for name in grads)   # bit-equal, with recompute too
    tiny = gradients(model, 2.0 ** -30)[1]
    monkeypatch.setattr(Transformer, "kernels", lambda self: None)
    plain_logp, plain = gradients(model)
    model = model.float()
    model.compute_dtype = FP32
    want_logp, want = gradients(model)
    assert (logp - want_logp).abs().mean() < 0.9 * (plain_logp - want_logp).abs().mean()
    for name, exact in want.items():
        if name.endswith("k_proj.bias"):   # zero but for rounding: a softmax does not see what all keys share
            continue
        size = exact.norm()
        error, other = (grads[name] - exact).norm() / size, (plain[name] - exact).norm() / size
        assert error < 1.1 * other + 1e-3, (name, float(error), float(other))
        assert (tiny[name] - grads[name]).norm() / size < 1e-2 + (0.01 if params == BF16 else 0), name
