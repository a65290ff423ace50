"""
The kernels of fused.py against plain torch: on a GPU as they are, elsewhere in Triton's interpreter with plain products
and plain attention in place of the calls that only CUDA has.
"""
import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_model
from test_optim import room, saved_bytes

import common
from engine import GOLDEN, MIX1, MIX2, Engine, key_uniform, sample_tokens
from model import Transformer, packed_attention, rms_norm, rope_angles

fused = pytest.importorskip("fused", reason="needs package triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def plain_calls(monkeypatch):
    """Where there is no CUDA: the product and the attention, each with the rounding of the real call."""
    torch.manual_seed(0)
    if DEVICE == "cuda":
        return
    seen = {}
    from triton.runtime import interpreter
    real = interpreter._patch_lang_tensor

    def with_numpy_2_4(tensor, scope):   # which makes no int of an array with one number in it
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_numpy_2_4)

    def attend(q, k, v, cu):
        return packed_attention(q.float(), k.float(), v.float(), cu.diff().tolist(), cu)

    def backward(dout, q, k, v, out, more, cu, longest):
        seen["scaled"] = float(dout.abs().max())
        parts = [x.detach().float().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            return [g.to(FP16) for g in torch.autograd.grad(attend(*parts, cu), parts, dout.float())]
    monkeypatch.setattr(fused, "product", lambda a, b: a.float() @ b.float())
    monkeypatch.setattr(fused, "flash", lambda q, k, v, cu, longest: (attend(q, k, v, cu).to(FP16), ()))
    monkeypatch.setattr(fused, "flash_backward", backward)
    return seen


def rand(*shape, dtype=FP32):
    return torch.randn(*shape).to(DEVICE, dtype)


def close(got, want, rel):
    """The error's size relative to the wanted tensor's."""
    assert got.shape == want.shape
    error = (got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)
    assert error < rel, float(error)


# ----------------------------------------------------------------------------------------------------------------------
# Kernel by kernel

@pytest.mark.parametrize("rows, c", [(5, 96), (1, 64), (37, 200)])
@pytest.mark.parametrize("add", [False, True])
def test_add_norm(rows, c, add):
    h, y, weight, dh, dx = rand(rows, c), rand(rows, c), rand(c), rand(rows, c), rand(rows, c)
    h, y, weight = h.requires_grad_(), y.requires_grad_(), weight.requires_grad_()
    for use_h in (True, False):   # nobody reads h after the last norm
        got, want = [], []
        new, x = fused.add_norm(h, y if add else None, weight, 1e-5, FP32)
        plain = h + y if add else h
        want_x = rms_norm(plain, weight, 1e-5, FP32)
        close(new, plain, 1e-7)
        close(x, want_x, 1e-6)
        inputs = [h, y, weight] if add else [h, weight]
        for out, (a, b) in ((got, (new, x)), (want, (plain, want_x))):
            out += torch.autograd.grad((a * dh).sum() * use_h + (b * dx).sum() if use_h else (b * dx).sum(), inputs)
        for a, b in zip(got, want):
            close(a, b, 1e-5)
    state = h.detach().clone()
    x = fused.add_norm_in_place(state, y.detach() if add else None, weight.detach(), 1e-5, BF16)
    assert torch.equal(state, new) and torch.equal(x, fused.add_norm(h, y if add else None, weight, 1e-5)[1])


def test_the_gradient_of_a_plain_sum_is_read_as_that_of_every_number():
    h, weight = rand(5, 96).requires_grad_(), rand(96).requires_grad_()
    got = torch.autograd.grad(fused.add_norm(h, None, weight, 1e-5, FP32)[1].sum(), [h, weight])
    for a, b in zip(got, torch.autograd.grad(rms_norm(h, weight, 1e-5, FP32).sum(), [h, weight])):
        close(a, b, 1e-5)


def test_partial_sums_of_many_rows(monkeypatch):
    monkeypatch.setattr(fused, "GRADIENT_PARTS", 3)
    h, weight = rand(17, 64).requires_grad_(), rand(64).requires_grad_()
    fused.add_norm(h, None, weight, 1e-5, FP32)[1].sin().sum().backward()
    got = [h.grad, weight.grad]
    want = torch.autograd.grad(rms_norm(h, weight, 1e-5, FP32).sin().sum(), [h, weight])
    for a, b in zip(got, want):
        close(a, b, 1e-5)


def test_swiglu():
    gate_up = rand(7, 2 * 1100) * 3
    a, kept = fused.swiglu(gate_up, keep=True)
    gate, up = gate_up.chunk(2, -1)
    want = (F.silu(gate.double()) * up.double()).to(BF16)
    assert torch.equal(a, fused.swiglu(gate_up))
    close(kept, gate_up, 5e-3)
    close(a, want, 5e-3)
    if DEVICE == "cuda":   # rounded once: equal but where exp's last bit decides; the interpreter cuts, not rounds
        assert torch.equal(kept, gate_up.to(BF16)) and (a != want).float().mean() < 1e-3
    dout = rand(7, 1100, dtype=BF16)
    x = kept.double().requires_grad_()
    gate, up = x.chunk(2, -1)
    want = torch.autograd.grad((F.silu(gate) * up * dout.double()).sum(), x)[0]
    close(fused.swiglu_backward(kept, dout), want, 4e-3)


SHAPES = [("llama", 6, 2, 64), ("qwen2", 4, 4, 32), ("qwen3", 5, 1, 24), ("qwen2", 3, 1, 128)]


@pytest.mark.parametrize("kind, heads, kv, d", SHAPES)
def test_blocks_of_a_layer_and_their_gradients(kind, heads, kv, d, plain_calls):
    """Forward against fp32 within the noise of bf16 weights and inputs; gradients of 1e-9 lose no more."""
    model = tiny_model(kind, hidden_size=48, num_attention_heads=heads, num_key_value_heads=kv, head_dim=d, scale=4.0,
                       intermediate_size=80).to(DEVICE)
    layer, lengths = model.model.layers[0], [19, 1, 13]
    with torch.no_grad():
        for p in layer.parameters():
            if p.ndim == 1:
                p.add_(rand(*p.shape) * 0.3)
    cu = torch.tensor([0, 19, 20, 33], dtype=torch.int32, device=DEVICE)
    cos, sin = rope_angles(torch.cat([torch.arange(n) for n in lengths]).to(DEVICE), d, 1e4)
    x = rand(33, 48, dtype=BF16).requires_grad_()
    for block, run, plain in ((layer.self_attn, lambda: fused.attention(x, layer.self_attn, cos, sin, cu, 19),
                               lambda x: layer.self_attn(x, cos, sin, lengths, cu)),
                              (layer.mlp, lambda: fused.mlp(x, layer.mlp), lambda x: layer.mlp(x))):
        wide = x.detach().float().requires_grad_()
        names, weights = zip(*block.named_parameters())
        with torch.no_grad():
            assert torch.equal(run(), run())
        y, want = run(), plain(wide)
        assert y.dtype == FP32
        close(y, want, 0.01)
        dy = rand(33, 48) * 1e-9
        got = torch.autograd.grad(y, (x, *weights), dy)
        again = torch.autograd.grad(run(), (x, *weights), dy)
        for name, a, b, c in zip(("x", *names), got, torch.autograd.grad(want, (wide, *weights), dy), again):
            assert torch.equal(a, c), name
            assert torch.isfinite(a).all(), name
            if name != "k_proj.bias":   # its gradient is zero but for rounding: softmax does not see a common shift
                close(a, b, 0.02)
    if plain_calls is not None:
        assert 4 <= plain_calls["scaled"] < 8


def test_fp16_saturates_and_keeps_nan():
    qkv = torch.zeros(2, 3 * 16, device=DEVICE)
    qkv[0], qkv[1, 40] = 1e6, float("nan")
    keys, values = (torch.zeros(2, 1, 8, 16, dtype=FP16, device=DEVICE) for _ in range(2))
    cos, sin = torch.ones(8, 8, device=DEVICE), torch.zeros(8, 8, device=DEVICE)
    at, pos = torch.tensor([3, 8], device=DEVICE), torch.tensor([3, 0], device=DEVICE)
    q = fused.rotate_store(qkv[None], None, keys, values, pos, at, cos, sin, None, 1e-5, 1, 1)
    assert (q[0] == 65504).all() and (keys[0, 0, 3] == 65504).all() and (values[0, 0, 3] == 65504).all()
    assert values[1, 0, 0].isnan().sum() == 1 and not q.isnan().any()


def heads_of(rows, kind, heads, kv, d, pos):
    """Sums of a qkv product in three parts, bias and norms as `kind` has them, angles, and what plain torch makes."""
    qkv, bias = rand(3, rows, (heads + 2 * kv) * d), rand((heads + 2 * kv) * d) if kind == "qwen2" else None
    norms = (rand(d), rand(d)) if kind == "qwen3" else None
    cos, sin = rope_angles(torch.arange(200, device=DEVICE), d, 1e4)
    x = (qkv.sum(0) if bias is None else qkv.sum(0) + bias).view(rows, -1, d)
    q, k, v = x.split([heads, kv, kv], 1)
    if norms:
        q, k = (rms_norm(a, w, 1e-5, FP32) for a, w in zip((q, k), norms))

    def turn(a):
        c, s, half = cos[pos][:, None], sin[pos][:, None], d // 2
        return torch.cat((a[..., :half] * c - a[..., half:] * s, a[..., half:] * c + a[..., :half] * s), -1)
    return qkv, bias, norms, cos, sin, turn(q), turn(k), v


@pytest.mark.parametrize("kind, heads, kv, d", SHAPES)
def test_the_cache_gets_what_the_trainer_rotates(kind, heads, kv, d):
    places, pos = torch.randperm(40)[:6 * kv].to(DEVICE), torch.tensor([0, 5, 3, 31, 2, 2], device=DEVICE)
    qkv, bias, norms, cos, sin, want_q, want_k, want_v = heads_of(6, kind, heads, kv, d, pos)
    keys, values = (torch.zeros(1, 1, 40, d, dtype=FP16, device=DEVICE) for _ in range(2))
    q = fused.rotate_store(qkv, bias, keys, values, pos, places, cos, sin, norms, 1e-5, heads, kv)
    close(q, want_q, 1e-3)
    close(keys[0, 0, places], want_k.flatten(0, 1), 1e-3)
    close(values[0, 0, places], want_v.flatten(0, 1), 1e-3)


@pytest.mark.parametrize("kind, heads, kv, d", [*SHAPES, ("llama", 4, 1, 24)])
def test_decode_attention_reads_what_is_used_and_the_new_token(kind, heads, kv, d):
    pos = torch.tensor([0, 3, 63, 64, 199], device=DEVICE)
    qkv, bias, norms, cos, sin, q, k, v = heads_of(5, kind, heads, kv, d, pos)
    keys, values = rand(7, kv, 200, d, dtype=FP16), rand(7, kv, 200, d, dtype=FP16)
    before = keys.clone(), values.clone()
    got = fused.attend(qkv, bias, keys, values, pos, cos, sin, norms, 1e-5, heads)
    for i, n in enumerate(pos.tolist()):
        for cache, old, new in zip((keys, values), before, (k, v)):   # the new token and nothing else
            old[i, :, n] = cache[i, :, n]
            close(cache[i, :, n], new[i], 1e-3)
        want = F.scaled_dot_product_attention(q[i][:, None], keys[i, :, :n + 1].float(), values[i, :, :n + 1].float(),
                                              enable_gqa=True)[:, 0].flatten()
        close(got[i], want, 4e-3)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


@pytest.mark.parametrize("rows, n, k", [(64, 200, 1152), (1, 64, 576), (40, 96, 1000), (16, 30, 48)])
def test_products_of_few_rows(rows, n, k):
    kind = BF16 if DEVICE == "cuda" else FP16   # which the interpreter multiplies as numbers
    x, w = rand(rows, k, dtype=kind), rand(n, k, dtype=kind)
    want = x.double() @ w.double().t()
    got = fused.product_parts(x, w, few=True)
    assert got.dtype == FP32 and (len(got) > 1) == (k > 500)
    close(got.sum(0), want, 1e-5)
    assert torch.equal(got, fused.product_parts(x, w, few=True))
    w = (rand(2 * n, k) * k ** -0.5).to(kind)
    gate, up = (x.double() @ w.double().t()).chunk(2, -1)
    close(fused.gated(x, w, few=True), F.silu(gate) * up, 4e-3)
    h, y, norm = rand(rows, n), rand(3, rows, n), rand(n)
    state = h.clone()
    got = fused.add_norm_in_place(state, y, norm, 1e-5, FP32)
    close(state, h + y.sum(0), 1e-6)
    close(got, rms_norm(state, norm, 1e-5, FP32), 1e-6)


def test_the_sampler_draws_with_the_hash_of_the_engine():
    assert [x.value for x in (fused.GOLDEN, fused.MIX1, fused.MIX2)] == [GOLDEN, MIX1, MIX2]
    logits, keys = rand(6, 5000) * 4, torch.randint(-2 ** 62, 2 ** 62, (9,)).to(DEVICE)
    logits[0, :2500] = float("-inf")
    pos = torch.arange(9, device=DEVICE) + 3
    token, logp, entropy = (torch.zeros(4, 9, dtype=d, device=DEVICE) for d in (torch.int32, FP32, FP32))
    for temperature, greedy in ((1.0, False), (0.7, False), (1.0, True)):
        state = torch.stack((pos, pos, keys))
        fused.sample(logits, state, torch.tensor([2], device=DEVICE), token, logp, entropy, temperature, greedy, 7)
        want = sample_tokens(logits, key_uniform(keys, pos + 1)[:6], temperature, greedy, True)
        assert torch.equal(token[2, :6], want[0].int())
        assert torch.allclose(logp[2, :6], want[1], atol=1e-5) and torch.allclose(entropy[2, :6], want[2], atol=1e-4)


@pytest.mark.parametrize("vocab", [61, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_prob_entropy_and_gradient_of_the_head(vocab, temperature):
    logits, targets, g = rand(5, vocab) * 5, torch.randint(0, vocab // 2, (5,)).to(DEVICE), rand(5)
    logits[1, vocab // 2:] = float("-inf")
    x = logits.double().requires_grad_()
    logps = (x / temperature).log_softmax(-1)
    want = logps.gather(1, targets[:, None])[:, 0]
    logp, entropy, lse = fused.head_stats(logits, targets, temperature)
    assert torch.allclose(logp.double(), want, atol=1e-5)
    assert torch.allclose(entropy.double(), torch.special.entr(logps.exp()).sum(-1), atol=1e-4)
    close(fused.head_grad(logits, lse, targets, g, temperature), torch.autograd.grad((want * g).sum(), x)[0], 5e-3)
    one = torch.tensor([0.5, 9.0, 9.0], device=DEVICE)[:1].expand(5)   # of a plain sum: one number, seen five times
    close(fused.head_grad(logits, lse, targets, one, temperature), torch.autograd.grad(
        ((x / temperature).log_softmax(-1).gather(1, targets[:, None]) * 0.5).sum(), x)[0], 5e-3)
    logits[2, 7] = float("nan")
    assert fused.head_stats(logits, targets, temperature)[0].isnan().tolist() == [False, False, True, False, False]


# ----------------------------------------------------------------------------------------------------------------------
# The whole model

@pytest.mark.parametrize("kind, tied, params", [("llama", True, FP32), ("llama", False, FP32), ("qwen2", True, BF16),
                                                ("qwen3", True, FP32)])
def test_the_model_runs_through_the_kernels_and_recompute_changes_no_gradient(kind, tied, params, monkeypatch):
    model = tiny_model(kind, scale=3.0, num_hidden_layers=2, tie_word_embeddings=tied).to(DEVICE, params)
    ids = torch.randint(5, 100, (24,), device=DEVICE)
    want = model(ids, [10, 14]).float()
    model.compute_dtype = BF16
    monkeypatch.setattr(Transformer, "kernels", lambda self: None)
    plain = model(ids, [10, 14]).float()
    monkeypatch.setattr(Transformer, "kernels", lambda self: fused)
    grads, dh = [], torch.randn_like(want) * 1e-7
    for model.checkpointing in (False, True, False):
        model.zero_grad()
        hidden = model(ids, [10, 14])
        assert hidden.dtype == FP32
        if params == FP32 and DEVICE == "cuda":   # the interpreter cuts where a GPU rounds
            assert (hidden - want).norm() < 0.9 * (plain - want).norm()
        close(hidden, want, 0.02)
        hidden.backward(dh)
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert len(grads[0]) == sum(1 for _ in model.parameters()) - (not tied)   # the head has no part in it
    for name, g in grads[0].items():
        assert torch.equal(g, grads[1][name]) and torch.equal(g, grads[2][name]), name
    assert model.head_weight.factors == (FP16 if params == FP32 else BF16)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_engine_decodes_through_the_kernels_as_the_model_runs(kind, monkeypatch):
    """Token by token into the cache of each row, against one forward pass in fp32."""
    model = tiny_model(kind, scale=3.0, num_hidden_layers=2).to(DEVICE)
    ids = torch.randint(5, 100, (4, 7), device=DEVICE)
    want = model(ids.flatten(), [7] * 4).view(4, 7, -1)
    model.compute_dtype = BF16
    if DEVICE != "cuda":
        monkeypatch.setattr(fused, "FEW", 0)   # the interpreter multiplies no bf16
    e = Engine(model, slots=4)
    e.fused, e.kv_dtype = fused, FP16
    e.reserve(4, 64)
    with torch.inference_mode():
        for t in range(7):
            close(e.blocks(ids[:, t], torch.full((4,), t, device=DEVICE), None, None), want[:, t], 0.02)


def test_frozen_weights_get_no_gradient(monkeypatch):
    monkeypatch.setattr(Transformer, "kernels", lambda self: fused)
    model = tiny_model("qwen2", scale=3.0).to(DEVICE)
    for name, p in model.named_parameters():
        p.requires_grad_("mlp.down" in name)
    model(torch.arange(5, 25, device=DEVICE), [20]).square().sum().backward()
    assert all((p.grad is not None) == ("mlp.down" in n) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_bytes_of_a_layer_are_those_that_autograd_keeps(kind, monkeypatch):
    monkeypatch.setattr(Transformer, "kernels", lambda self: fused)
    models = [tiny_model(kind, hidden_size=64, head_dim=16, intermediate_size=160, num_hidden_layers=n).to(DEVICE)
              for n in (1, 2)]
    kept = [saved_bytes(m, 48) - saved_bytes(m, 16) for m in models]   # what grows with tokens, not with weights
    assert (kept[1] - kept[0]) / 32 == pytest.approx(common.layer_bytes(models[0]), rel=0.05)


def test_the_room_counts_the_sums_that_pass(monkeypatch, tmp_path):
    monkeypatch.setattr(Transformer, "kernels", lambda self: fused)
    model, run = room(monkeypatch, tmp_path, 2 ** 40)
    c = model.config
    assert run.room["a_token"] == c.num_hidden_layers * common.layer_bytes(model) + 8 * c.intermediate_size
