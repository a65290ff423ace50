"""
Triton kernels of the decode step on CUDA in bf16: what lies between the matrix products, each in one launch.

A small model's step is launch-bound: 24 small kernels a layer cost more than its products. Here it is nine: qkv
product, rotation and cache write, attention, output product, residual and norm, gate/up product, SwiGLU, down product,
residual and norm. Every function has a plain-torch form in engine.py, rounds where that rounds, and is tested against
it. (The file cannot be called kernels.py: transformers imports an optional package of that name.)
"""
import torch
import triton
import triton.language as tl

import engine

# ----------------------------------------------------------------------------------------------------------------------
# Residual and norm


@triton.jit
def add_norm_kernel(h, y, weight, out, eps, C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < C
    x = tl.load(h + row * C + col, mask=inside, other=0.0)
    if ADD:
        x += tl.load(y + row * C + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + row * C + col, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / C + eps)
    w = tl.load(weight + col, mask=inside, other=0.0)
    tl.store(out + row * C + col, (x * scale * w).to(out.dtype.element_ty), mask=inside)


def add_norm(h, y, weight, eps, dtype):
    """h (R, C) fp32, in place: h += y, unless y is None; -> rmsnorm(h) * weight as `dtype`."""
    rows, c = h.shape
    out = torch.empty(rows, c, dtype=dtype, device=h.device)
    block = triton.next_power_of_2(c)
    add_norm_kernel[(rows,)](h, h if y is None else y, weight, out, eps, C=c, BLOCK=block, ADD=y is not None,
                             num_warps=4 if block <= 2048 else 8)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Rotation, head norms and the write into the cache


@triton.jit
def rotate_store_kernel(qkv, q_out, keys, values, pos, places, cos, sin, q_weight, k_weight, eps,
                        HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    source = qkv + row * (HQ + 2 * HKV) * D + head * D
    if head >= HQ + HKV:
        place = tl.load(places + row * HKV + head - HQ - HKV)
        tl.store(values + place * D + d, tl.load(source + d, mask=inside), mask=inside)
    else:
        other = (d + D // 2) % D   # the other member of each rotated pair
        x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            weight = q_weight if head < HQ else k_weight
            scale = 1.0 / tl.sqrt(tl.sum(x * x) / D + eps)
            kind = qkv.dtype.element_ty   # rounded before the rotation, as in model.py
            x = (x * scale * tl.load(weight + d, mask=inside, other=0.0)).to(kind).to(tl.float32)
            y = (y * scale * tl.load(weight + other, mask=inside, other=0.0)).to(kind).to(tl.float32)
        p = tl.load(pos + row)
        x = x * tl.load(cos + p * D + d, mask=inside, other=0.0) + y * tl.load(sin + p * D + d, mask=inside, other=0.0)
        if head < HQ:
            tl.store(q_out + (row * HQ + head) * D + d, x.to(q_out.dtype.element_ty), mask=inside)
        else:
            place = tl.load(places + row * HKV + head - HQ)
            tl.store(keys + place * D + d, x.to(keys.dtype.element_ty), mask=inside)


def rotate_store(qkv, keys, values, pos, places, cos, sin, norms, eps, hq, hkv):
    """
    qkv (R, (Hq + 2 Hkv) D) -> rotated q (R, Hq, D); rotated keys and the values go to `places` (R * Hkv,), row numbers
    of keys and values seen as (N, D). cos, sin (T, 1, D), sin's first half negative. norms: the weights (D,) of the two
    head norms, or None.
    """
    rows, d = qkv.shape[0], cos.shape[-1]
    q = torch.empty(rows, hq, d, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norms or (cos, cos)
    rotate_store_kernel[(rows, hq + 2 * hkv)](qkv, q, keys, values, pos, places, cos, sin, q_weight, k_weight, eps,
                                              HQ=hq, HKV=hkv, D=d, BLOCK=triton.next_power_of_2(d),
                                              NORM=norms is not None, num_warps=1)
    return q


# ----------------------------------------------------------------------------------------------------------------------
# SwiGLU


@triton.jit
def swiglu_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    gate = tl.load(gate_up + row * 2 * F + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + col, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)   # torch rounds between the two steps
    tl.store(out + row * F + col, (silu * up).to(kind), mask=inside)


def swiglu(gate_up):
    """(R, 2 F), gate then up -> silu(gate) * up (R, F)."""
    rows, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, f, dtype=gate_up.dtype, device=gate_up.device)
    swiglu_kernel[(rows, triton.cdiv(f, 1024))](gate_up, out, F=f, BLOCK=1024, num_warps=4)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Decode attention: one program reads the used part of one slot's key/value head, for all query heads of its group


@triton.jit
def attend_kernel(q, keys, values, pos, out, length, scale, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                  BG: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    used = (tl.load(pos + row) + 1).to(tl.int32)
    g, d = tl.arange(0, BG), tl.arange(0, BD)
    real = (g[:, None] < G) & (d[None, :] < D)
    at = (row * HKV + head) * G * D + g[:, None] * D + d[None, :]
    qt = tl.load(q + at, mask=real, other=0.0)                          # (BG, BD): tensor cores want 16 rows
    first = (row * HKV + head) * length * D
    top = tl.full([BG], float("-inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BD], tl.float32)
    for start in range(0, used, BN):
        t = start + tl.arange(0, BN)
        some = (t[:, None] < used) & (d[None, :] < D)
        place = first + t[:, None] * D + d[None, :]
        kt = tl.load(keys + place, mask=some, other=0.0)
        vt = tl.load(values + place, mask=some, other=0.0)
        s = tl.dot(qt, tl.trans(kt)) * scale                            # (BG, BN), in units of log2
        s = tl.where(t[None, :] < used, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(vt.dtype), vt)
        top = new
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def attend(q, keys, values, pos):
    """q (R, Hq, D), keys and values (S, Hkv, T, D), row r reading slot r up to pos[r] -> (R, Hq * D)."""
    rows, hq, d = q.shape
    _, hkv, length, _ = keys.shape
    out = torch.empty(rows, hq * d, dtype=q.dtype, device=q.device)
    group = hq // hkv
    attend_kernel[(rows, hkv)](q, keys, values, pos, out, length, d ** -0.5 * 1.4426950408889634, HKV=hkv, G=group, D=d,
                               BG=max(16, triton.next_power_of_2(group)), BD=max(16, triton.next_power_of_2(d)), BN=64,
                               num_warps=2, num_stages=3)   # of 36 settings the best or near it in six shapes
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Sampling: the logits are read once. Blocks leave their maximum and sum; the CDF is then walked over block sums, and
# only the block that holds the token is read again.


GOLDEN, MIX1, MIX2 = (tl.constexpr(x) for x in (engine.GOLDEN, engine.MIX1, engine.MIX2))


@triton.jit
def mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def block_sums_kernel(logits, top, total, best, dot, V, temperature, NB: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + col, mask=col < V, other=float("-inf")) / temperature
    m = tl.max(z, 0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    e = tl.exp(z - shift)
    tl.store(top + row * NB + block, m)
    tl.store(total + row * NB + block, tl.sum(e, 0))
    tl.store(best + row * NB + block, block * BLOCK + tl.argmax(z, 0))
    tl.store(dot + row * NB + block, tl.sum(tl.where(e > 0, e * (z - shift), 0.0), 0))


@triton.jit
def pick_kernel(logits, top, total, best, dot, state, counter, out_token, out_logp, out_entropy, V, slots, last,
                temperature, NB: tl.constexpr, NBP: tl.constexpr, BLOCK: tl.constexpr, GREEDY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.load(counter)
    pos = tl.load(state + slots + row) + 1
    b = tl.arange(0, NBP)
    m = tl.load(top + row * NB + b, mask=b < NB, other=float("-inf"))
    s = tl.load(total + row * NB + b, mask=b < NB, other=0.0)
    peak = tl.max(m, 0)
    w = s * tl.exp(m - peak)
    sums = tl.cumsum(w, 0)
    whole = tl.sum(w, 0)
    # entropy = log(sum) - sum(p (z - peak)); a block's own sum is relative to its maximum
    inner = tl.load(dot + row * NB + b, mask=b < NB, other=0.0)
    shift = tl.where(s > 0, m - peak, 0.0)
    mean = tl.sum(tl.where(w > 0, tl.exp(shift) * (inner + s * shift), 0.0), 0) / whole
    tl.store(out_entropy + j * slots + row, tl.log(whole) - mean)
    if GREEDY:
        # the first of equals, as argmax
        token = tl.min(tl.where(m == peak, tl.load(best + row * NB + b, mask=b < NB, other=V), V), 0).to(tl.int64)
    else:
        # engine.key_uniform of the row's key and the new token's position
        bits = mix((tl.load(state + 2 * slots + row) + GOLDEN) ^ mix(pos + GOLDEN))
        target = ((bits >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08 * whole
        block = tl.minimum(tl.sum(((sums <= target) & (b < NB)).to(tl.int32), 0), NB - 1)
        before = tl.sum(tl.where(b < block, w, 0.0), 0)
        col = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * V + col, mask=col < V, other=float("-inf")) / temperature
        e = tl.exp(z - peak)
        inside = before + tl.cumsum(e, 0)
        step = tl.sum((inside <= target).to(tl.int32), 0)
        # rounding may leave the block's end short of the target: then its last token of any probability
        final = tl.max(tl.where(e > 0, tl.arange(0, BLOCK), 0), 0)
        token = (block * BLOCK + tl.minimum(step, final)).to(tl.int64)
    token = tl.minimum(token, V - 1)   # acts on NaN only, which the host reports
    zt = tl.load(logits + row * V + token) / temperature
    tl.store(out_token + j * slots + row, token)
    tl.store(out_logp + j * slots + row, zt - peak - tl.log(whole))
    tl.store(state + row, token)
    tl.store(state + slots + row, tl.minimum(pos, last))


def sample(logits, state, counter, out_token, out_logp, out_entropy, temperature, greedy, last):
    """
    engine.sample_tokens and the bookkeeping of a captured step: logits (R, V) fp32 -> the token, its log-prob and the
    entropy at [counter] of the out tensors (K, S). state (3, S): token and position, moved on (the position to `last`
    at most), and the row's key. Greedy takes temperature 1.
    """
    rows, v = logits.shape
    block = 2048
    nb = triton.cdiv(v, block)
    parts = torch.empty(3, rows, nb, device=logits.device)
    best = torch.empty(rows, nb, dtype=torch.int32, device=logits.device)
    temperature = 1.0 if greedy else temperature
    block_sums_kernel[(rows, nb)](logits, parts[0], parts[1], best, parts[2], v, temperature, NB=nb, BLOCK=block,
                                  num_warps=4)
    pick_kernel[(rows,)](logits, parts[0], parts[1], best, parts[2], state, counter, out_token, out_logp,
                         out_entropy, v, state.shape[1], last, temperature, NB=nb, NBP=triton.next_power_of_2(nb),
                         BLOCK=block, GREEDY=greedy, num_warps=4)
