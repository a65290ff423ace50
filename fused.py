"""
Triton kernels for CUDA in bf16: all that lies between the matrix products, each step in one launch, and the products of
a decode step of few rows. model.py trains through them and engine.py samples through them, so that both round at the
same places.

Numbers. The factors of a layer's products are bf16 (the head's: model.head_factors) and their fp32 sums stay unrounded
until the next step has used them. q, k, v and the engine's cache are fp16: rotated once, in fp32, and saturated at the
largest fp16 number. Gradients that meet a product are bf16; attention's, which must be fp16, are scaled by a power of
two that is taken from their own maximum on the device. Sums over tokens (norm weights, biases) are made of partial sums
in a fixed order: a repeat is bit-equal.

A small model's step is bound by launches: of a layer's forward pass seven in a decode step (qkv product; rotation,
cache write and attention; output product; residual and norm; gate/up product and SwiGLU; down product; residual and
norm; above FEW rows SwiGLU is one of its own) and ten in the trainer. The plain path of model.py and engine.py is what
all of it is tested against.

How to read a kernel. It is the work of one program; `kernel[grid](...)` starts a grid of them, and tl.program_id says
which one this is. A tensor comes as the address of its first number, rows one after the other, so `h + row * C + col`
are the addresses of a row. A program works on blocks whose sizes are powers of two and known when it is compiled
(tl.constexpr); a mask keeps it off what lies beyond the real size. Flags in capitals choose at compile time what is
done. Where a flag leaves an address unread, any tensor stands in its place. R rows, T tokens, C hidden size, D head
size, F width of the SwiGLU, V vocabulary, Hq and Hkv query and key/value heads, S parts of a product's sum, which its
reader adds in order. Nothing is checked here: Transformer.kernels and Engine.load decide where these kernels serve;
what CUDA refuses is its RuntimeError, what does not fit is Triton's OutOfResources.
"""
import functools

import torch
import triton
import triton.language as tl

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEW = 64          # rows up to which a product is thin_kernel's: more are no faster there than in the library
MOST_PARTS = 12   # of a product's sum: more would cost their reader what they gain
LOG2_E = 1.4426950408889634   # exp2 is the GPU's own exponential
GRADIENT_PARTS = 1024   # partial sums of a gradient over tokens: a few programs for each multiprocessor of any GPU


def product(a, b):
    """a (M, K) @ b (K, N), bf16 or fp16 -> (M, N) fp32, the sum as it was made."""
    return torch.mm(a, b, out_dtype=FP32)


@triton.jit
def narrow(x, kind: tl.constexpr):
    """fp32 -> kind. fp16 ends at 65504: what is beyond saturates, and NaN stays NaN, so that it is found."""
    if kind == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(kind)


def most_parts(parts):
    """Rounded up, so that a kernel is compiled for few numbers of parts."""
    return 1 if parts <= 1 else 4 if parts <= 4 else MOST_PARTS


@triton.jit
def load_sum(at, inside, stride, S, MOST: tl.constexpr):
    """The sum, in order, of S blocks that lie `stride` numbers apart, S from 1 to MOST: no load waits for another."""
    x = tl.load(at, mask=inside, other=0.0)
    for s in tl.static_range(1, MOST):
        x += tl.load(at + s * stride, mask=inside & (s < S), other=0.0)
    return x


@functools.cache
def stages(most, each, device):
    """Blocks of `each` bytes that may be under way, `most` or what the GPU's shared memory holds."""
    if device.type != "cuda":
        return most
    return max(1, min(most, torch.cuda.get_device_properties(device).shared_memory_per_block_optin // each))


# ----------------------------------------------------------------------------------------------------------------------
# Products of few rows, those of a decode step: its time is that of reading each weight once


# Grid (blocks of BN weights, S). x (R, K), R at most BM; w (N, K). A program multiplies all rows with its weights over
# `each` blocks of 64 of K: enough programs for the GPU although N is small -> out (S, R, N) fp32, S parts of the sum
# that whoever reads them adds in order. GLU: w (2 N, K), gate then up -> out (R, N): silu(gate) * up; S is 1. RAGGED: K
# is no multiple of 64.
@triton.jit(do_not_specialize=["rows", "each"])
def thin_kernel(x, w, out, rows, N, K, each, BM: tl.constexpr, BN: tl.constexpr, GLU: tl.constexpr,
                RAGGED: tl.constexpr):
    row, col = tl.arange(0, BM)[:, None], (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    part = tl.program_id(1)
    k = tl.arange(0, 64)
    xs = x + row * K + part * each * 64 + k[None, :]
    ws = w + col.to(tl.int64) * K + part * each * 64 + k[:, None]
    a, b = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for i in range(part * each, tl.minimum((part + 1) * each, tl.cdiv(K, 64))):
        in_x, in_w = row < rows, col < N
        if RAGGED:
            in_x, in_w = in_x & (i * 64 + k[None, :] < K), in_w & (i * 64 + k[:, None] < K)
        xt = tl.load(xs, mask=in_x, other=0.0)
        a = tl.dot(xt, tl.load(ws, mask=in_w, other=0.0), a)
        if GLU:
            b = tl.dot(xt, tl.load(ws + N.to(tl.int64) * K, mask=in_w, other=0.0), b)
        xs += 64
        ws += 64
    if GLU:
        a = a / (1.0 + tl.exp(-a)) * b
    at = out + (part.to(tl.int64) * rows + row) * N + col
    tl.store(at, a.to(out.dtype.element_ty), mask=(row < rows) & (col < N))


def thin(x, w, glu=False):
    """
    x (R, K) @ w (N, K)^T, both bf16, R at most FEW -> (S, R, N) fp32: S parts of the sum, added by their reader. glu: w
    (2 N, K), gate and up, -> silu(gate) * up (R, N), rounded once, bf16.
    """
    (rows, k), n = x.shape, w.shape[0] // (2 if glu else 1)
    bn, share, most = cut(n, k, glu)
    count = triton.cdiv(k, 64 * share)
    out = torch.empty((rows, n) if glu else (count, rows, n), dtype=BF16 if glu else FP32, device=x.device)
    bm = max(16, triton.next_power_of_2(rows))
    thin_kernel[(triton.cdiv(n, bn), count)](
        x, w, out, rows, n, k, share, BM=bm, BN=bn, GLU=glu, RAGGED=k % 64 > 0,
        num_stages=stages(most, 128 * (bm + bn * (1 + glu)), x.device), num_warps=4)
    return out


def cut(n, k, glu):
    """
    -> weights a program, blocks of 64 of K a program, blocks under way. About 6 blocks a program, and at most 264
    programs: two for each multiprocessor of an H200, on which this was measured.
    """
    blocks = triton.cdiv(k, 64)
    if glu:
        return 32, blocks, 4
    bn = 64 if n * k > 2 ** 21 else 32
    return bn, triton.cdiv(blocks, max(1, min(round(blocks / 6), 264 * bn // n, MOST_PARTS))), 6


def product_parts(x, w, few):
    """x (R, K) @ w (N, K)^T -> (S, R, N) fp32: S parts of the sum, for few rows; else the sum itself, S = 1."""
    return thin(x, w) if few else product(x, w.t())[None]


def gated(x, w, few):
    """x (R, K), w (2 N, K): gate and up -> silu(gate) * up (R, N), rounded once."""
    return thin(x, w, glu=True) if few else swiglu(product(x, w.t()))


# ----------------------------------------------------------------------------------------------------------------------
# Residual and norm


# A program a row. h, h_out (R, C) fp32, y (S, R, C) fp32, weight (C,); out (R, C): h / rms(h) * weight; inverse (R,): 1
# / rms, which the backward pass wants. S > 0: the parts of y are added first and the sum written to h_out; KEEP:
# inverse is written.
@triton.jit(do_not_specialize=["S"])
def add_norm_kernel(h, y, weight, h_out, out, inverse, eps, S, C: tl.constexpr, BLOCK: tl.constexpr,
                    MOST: tl.constexpr, KEEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < C
    x = tl.load(h + row * C + col, mask=inside, other=0.0)
    if S > 0:
        x += load_sum(y + row * C + col, inside, tl.num_programs(0).to(tl.int64) * C, S, MOST)
        tl.store(h_out + row * C + col, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / C + eps)
    if KEEP:
        tl.store(inverse + row, scale)
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * C + col, narrow(x * scale * w, out.dtype.element_ty), mask=inside)


# A program takes `each` rows one by one and leaves its own sum over them in dweight (parts, C): programs that add to
# one place would do so in any order. With x = h / rms and g = dx weight, row by row: dh = (g - x mean(g x)) / rms; and
# dweight = sum of dx x. MORE: h also went on without the norm, as the residual stream, and brings the gradient dh_in of
# its own.
@triton.jit(do_not_specialize=["rows", "each"])
def add_norm_backward_kernel(h, inverse, weight, dx, dh_in, dh, dweight, rows, each, C: tl.constexpr,
                             BLOCK: tl.constexpr, MORE: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    w = tl.load(weight + col, mask=col < C, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for i in range(0, each):
        row = part * each + i
        inside = (col < C) & (row < rows)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)
        x = tl.load(h + row * C + col, mask=inside, other=0.0) * scale
        g = tl.load(dx + row * C + col, mask=inside, other=0.0).to(tl.float32)
        sums += g * x
        g *= w
        d = scale * (g - x * (tl.sum(g * x) / C))   # the norm takes away what would only change the length of h
        if MORE:
            d += tl.load(dh_in + row * C + col, mask=inside, other=0.0)
        tl.store(dh + row * C + col, d, mask=inside)
    tl.store(dweight + part * C + col, sums, mask=col < C)


def run_add_norm(h, y, weight, eps, dtype, h_out, inverse):
    (rows, c), count = h.shape, 0 if y is None else y.numel() // h.numel()
    out = torch.empty(rows, c, dtype=dtype, device=h.device)
    block = triton.next_power_of_2(c)
    warps = 4 if block <= 2048 else 8
    if count > 1:   # many loads, few programs
        warps = min(16, max(1, block // 128))
    add_norm_kernel[(rows,)](h, h if y is None else y, weight, h_out, out, h if inverse is None else inverse, eps,
                             count, C=c, BLOCK=block, MOST=most_parts(count), KEEP=inverse is not None,
                             num_warps=warps)
    return out


def add_norm_in_place(h, y, weight, eps, dtype):
    """h (R, C) fp32: h += the parts of y (S, R, C) fp32, unless it is None; -> rmsnorm(h) * weight as `dtype`."""
    return run_add_norm(h, y, weight, eps, dtype, h, None)


class AddNorm(torch.autograd.Function):
    """Keeps the sum and 1 / rms. dh_in is None where h goes nowhere else, as behind the last layer."""

    @staticmethod
    def forward(ctx, h, y, weight, eps, dtype):
        ctx.set_materialize_grads(False)
        new = h if y is None else torch.empty_like(h)
        inverse = torch.empty(h.shape[0], device=h.device)
        x = run_add_norm(h, y, weight, eps, dtype, new, inverse)
        ctx.save_for_backward(new, inverse, weight)
        ctx.added = y is not None
        return new, x

    @staticmethod
    def backward(ctx, dh_in, dx):
        h, inverse, weight = ctx.saved_tensors
        rows, c = h.shape
        block, parts = triton.next_power_of_2(c), min(rows, GRADIENT_PARTS)
        dh, dweight = torch.empty_like(h), torch.empty(parts, c, device=h.device)
        add_norm_backward_kernel[(parts,)](
            h, inverse, weight, dx.contiguous(), h if dh_in is None else dh_in.contiguous(), dh, dweight, rows,
            triton.cdiv(rows, parts), C=c, BLOCK=block, MORE=dh_in is not None, num_warps=4 if block <= 2048 else 8)
        return dh, dh if ctx.added else None, dweight.sum(0).to(weight.dtype), None, None


def add_norm(h, y, weight, eps, dtype=BF16):
    """h (T, C) fp32, y the same or None -> h + y, and rmsnorm(h + y) * weight as `dtype`."""
    return AddNorm.apply(h, y, weight, eps, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Bias, head norms and rotation: from the sum of the qkv product to q, k, v in fp16


# BR heads at once, a row each. source (BR, 1): the address of each; + d, d (1, BD), its numbers; the sum of S parts
# that lie `stride` numbers apart, plus bias, normed, then turned by row angle (BR, 1) of cos and sin (T, D / 2).
# Rotated pairs are i and i + D / 2. KEEP with NORM: what the head norm reads goes to `before` (BR, 1) + d, rounded.
@triton.jit
def turned(source, stride, bias, weight, angle, cos, sin, before, d, inside, eps, S, D: tl.constexpr,
           MOST: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr):
    other = (d + D // 2) % D   # the other member of each pair
    x, y = load_sum(source + d, inside, stride, S, MOST), load_sum(source + other, inside, stride, S, MOST)
    if BIAS:
        x += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(bias + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        if KEEP:
            tl.store(before + d, x.to(before.dtype.element_ty), mask=inside)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + other, mask=d < D, other=0.0).to(tl.float32)
    at = angle * (D // 2) + d % (D // 2)
    s = tl.load(sin + at, mask=inside, other=0.0)
    return x * tl.load(cos + at, mask=inside, other=0.0) + y * tl.where(d < D // 2, -s, s)


# Grid (tiles of BR rows, Hq + 2 Hkv heads): a program has one head of BR tokens. qkv (S, R, (Hq + 2 Hkv) D) fp32; a
# query is written to q (R, Hq, D); a key or value to k, v (R, Hkv, D) or, with CACHE, to the rows that `places` (R,
# Hkv) names of the cache. KEEP with NORM: `before` (R, Hq + Hkv, D) keeps what the head norms read. cos, sin (T, D /
# 2): without CACHE those of each row, with it looked up at `pos` (R,).
@triton.jit(do_not_specialize=["rows", "S"])
def rotate_kernel(qkv, bias, q, k, v, before, pos, places, cos, sin, q_weight, k_weight, eps, rows, S, HQ: tl.constexpr,
                  HKV: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
                  BIAS: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, CACHE: tl.constexpr):
    row, head = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None], tl.program_id(1)
    d = tl.arange(0, BD)[None, :]
    inside = (row < rows) & (d < D)
    source, stride = qkv + (row * (HQ + 2 * HKV) + head) * D, rows.to(tl.int64) * (HQ + 2 * HKV) * D
    if head >= HQ + HKV:
        x = load_sum(source + d, inside, stride, S, MOST)
        if BIAS:
            x += tl.load(bias + head * D + d, mask=d < D, other=0.0).to(tl.float32)
        place = row * HKV + head - HQ - HKV
        if CACHE:
            place = tl.load(places + place, mask=row < rows, other=0)
        tl.store(v + place * D + d, narrow(x, v.dtype.element_ty), mask=inside)
    else:
        weight = q_weight if head < HQ else k_weight
        angle = row
        if CACHE:
            angle = tl.load(pos + row, mask=row < rows, other=0)
        x = turned(source, stride, bias + head * D, weight, angle, cos, sin, before + (row * (HQ + HKV) + head) * D, d,
                   inside, eps, S, D, MOST, BIAS, NORM, KEEP)
        if head < HQ:
            tl.store(q + (row * HQ + head) * D + d, narrow(x, q.dtype.element_ty), mask=inside)
        else:
            place = row * HKV + head - HQ
            if CACHE:
                place = tl.load(places + place, mask=row < rows, other=0)
            tl.store(k + place * D + d, narrow(x, k.dtype.element_ty), mask=inside)


@triton.jit
def grad_scale(amax):
    """A power of two that brings the largest gradient to between 4 and 8, where fp16 has room on both sides."""
    bits = tl.load(amax).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 255, 27)   # a gradient of zeros takes some scale too
    return ((256 - exponent) << 23).to(tl.float32, bitcast=True)


# x (n,) times grad_scale, as fp16. The factor stays on the device: the host never waits for it.
@triton.jit
def scale_kernel(x, amax, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, narrow(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) * grad_scale(amax), tl.float16),
             mask=at < n)


# The way back: dq (R, Hq, D), dk, dv (R, Hkv, D) fp16, scaled -> dqkv (R, (Hq + 2 Hkv) D) bf16, unscaled. A rotation's
# gradient is the turn back by the same angle; a head norm's is that of add_norm. Grid (parts, heads); a program takes
# `each` tiles of BR rows and leaves its sums for biases and norm weights in dbias, dweight (parts, Hq + 2 Hkv, D).
@triton.jit(do_not_specialize=["rows", "each"])
def rotate_backward_kernel(dq, dk, dv, amax, before, cos, sin, q_weight, k_weight, dqkv, dbias, dweight, eps, rows,
                           each, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
                           BD: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr):
    part, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)[None, :]
    other = (d + D // 2) % D
    unscale = 1.0 / grad_scale(amax)
    bias_sum, weight_sum = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, each):
        row = ((part * each + i) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
        inside = (row < rows) & (d < D)
        if head >= HQ + HKV:
            g = tl.load(dv + (row * HKV + head - HQ - HKV) * D + d, mask=inside, other=0.0).to(tl.float32) * unscale
        else:
            source = dq + (row * HQ + head) * D
            if head >= HQ:
                source = dk + (row * HKV + head - HQ) * D
            g = tl.load(source + d, mask=inside, other=0.0).to(tl.float32) * unscale
            o = tl.load(source + other, mask=inside, other=0.0).to(tl.float32) * unscale
            angle = row * (D // 2) + d % (D // 2)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            g = g * tl.load(cos + angle, mask=inside, other=0.0) + o * tl.where(d < D // 2, s, -s)   # turned back
            if NORM:
                weight = q_weight if head < HQ else k_weight
                x = tl.load(before + (row * (HQ + HKV) + head) * D + d, mask=inside, other=0.0).to(tl.float32)
                scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
                x *= scale
                weight_sum += tl.sum(g * x, 0)
                g *= tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
                g = scale * (g - x * (tl.sum(g * x, 1) / D)[:, None])
        if BIAS:
            bias_sum += tl.sum(g, 0)
        tl.store(dqkv + (row * (HQ + 2 * HKV) + head) * D + d, g.to(dqkv.dtype.element_ty), mask=inside)
    at = (part * (HQ + 2 * HKV) + head) * D + tl.arange(0, BD)
    if BIAS:
        tl.store(dbias + at, bias_sum, mask=tl.arange(0, BD) < D)
    if NORM:
        tl.store(dweight + at, weight_sum, mask=tl.arange(0, BD) < D)


def rotate_store(qkv, bias, keys, values, pos, places, cos, sin, norms, eps, hq, hkv):
    """
    qkv (S, R, (Hq + 2 Hkv) D) fp32, in S parts, and its bias or None -> rotated q (R, Hq, D) fp16; rotated keys and the
    values go to `places` (R * Hkv,), row numbers of keys and values seen as (N, D). cos, sin (T, D / 2), read at `pos`
    (R,). norms: the weights (D,) of the two head norms, or None.
    """
    count, rows, d = qkv.shape[0], qkv.shape[1], keys.shape[-1]
    q = torch.empty(rows, hq, d, dtype=keys.dtype, device=qkv.device)
    q_weight, k_weight = norms or (cos, cos)
    rotate_kernel[(rows, hq + 2 * hkv)](
        qkv, qkv if bias is None else bias, q, keys, values, q, pos, places, cos, sin, q_weight, k_weight, eps, rows,
        count, HQ=hq, HKV=hkv, D=d, MOST=most_parts(count), BR=1, BD=triton.next_power_of_2(d), BIAS=bias is not None,
        NORM=norms is not None, KEEP=False, CACHE=True, num_warps=1)
    return q


# ----------------------------------------------------------------------------------------------------------------------
# SwiGLU (arXiv 2002.05202)


# Grid (R, blocks of F). gate_up (R, 2 F) fp32; KEEP: `kept` gets it rounded, all that the backward pass needs
@triton.jit
def swiglu_kernel(gate_up, out, kept, F: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    gate = tl.load(gate_up + row * 2 * F + col, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * F + F + col, mask=inside, other=0.0)
    if KEEP:
        tl.store(kept + row * 2 * F + col, gate.to(kept.dtype.element_ty), mask=inside)
        tl.store(kept + row * 2 * F + F + col, up.to(kept.dtype.element_ty), mask=inside)
    tl.store(out + row * F + col, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


# With s = sigmoid(gate): d silu(gate) / d gate = s (1 + gate (1 - s)), and d / d up = silu(gate) = gate s
@triton.jit
def swiglu_backward_kernel(gate_up, dout, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    gate = tl.load(gate_up + row * 2 * F + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + col, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dout + row * F + col, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    kind = out.dtype.element_ty
    tl.store(out + row * 2 * F + col, (g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(kind), mask=inside)
    tl.store(out + row * 2 * F + F + col, (g * gate * sigmoid).to(kind), mask=inside)


def swiglu(gate_up, dtype=BF16, keep=False):
    """(R, 2 F) fp32, gate then up -> silu(gate) * up (R, F), rounded once; with `keep` also gate_up, rounded."""
    rows, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, f, dtype=dtype, device=gate_up.device)
    kept = torch.empty_like(gate_up, dtype=dtype) if keep else None
    swiglu_kernel[(rows, triton.cdiv(f, 1024))](gate_up, out, out if kept is None else kept, F=f, BLOCK=1024, KEEP=keep,
                                                num_warps=4)
    return (out, kept) if keep else out


def swiglu_backward(gate_up, dout):
    """gate_up (R, 2 F) and the gradient of the output (R, F), bf16 -> the gradient of gate_up."""
    rows, f = dout.shape
    out = torch.empty_like(gate_up)
    swiglu_backward_kernel[(rows, triton.cdiv(f, 1024))](gate_up, dout, out, F=f, BLOCK=1024, num_warps=4)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# The two blocks of a layer, forward and backward. The fp32 sums live inside: what crosses autograd is x (T, C) in bf16
# and the block's output (T, C) in fp32.


def stack(weights, dtype=BF16):
    """Weights under each other in dim 0, as `dtype`: one launch for the cast, none where they lie so already."""
    first = weights[0]
    together = first.dtype == dtype and all(
        w.data_ptr() == v.data_ptr() + v.numel() * v.element_size() and w.dtype == dtype
        and w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for v, w in zip(weights, weights[1:]))
    rows = [w.shape[0] for w in weights]
    if together:   # bf16 weights, put there by engine.take
        return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())
    out = torch.empty(sum(rows), *first.shape[1:], dtype=dtype, device=first.device)
    torch._foreach_copy_(list(out.split(rows)), [w.detach() for w in weights])
    return out


def weight_grads(dy, x, weights):
    """Gradients of stacked weights from dy (T, N) and x (T, K), bf16: summed in fp32, in the weights' dtype."""
    dw = product(dy.t(), x) if weights[0].dtype == FP32 else dy.t() @ x
    return dw.split([w.shape[0] for w in weights])


def flash(q, k, v, cu, longest):
    """Causal attention inside each packed sequence: out like q, and what the backward pass needs of it."""
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, True,
                                                                         False)
    return out, (lse, state, unused)


def flash_backward(dout, q, k, v, out, more, cu, longest):
    """The gradients of q, k, v. Of its two ways the kernel takes the one that adds in a fixed order where torch is set
    so; the setting is made for this call alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True)
    try:
        return torch.ops.aten._flash_attention_backward(dout, q, k, v, out, more[0], cu, cu, longest, longest, 0.0,
                                                        True, *more[1:])
    finally:
        torch._C._set_deterministic_algorithms(before)


class Attention(torch.autograd.Function):
    """
    From the normalised x to what is added to h: qkv product, rotation, attention, output product. Weights come one by
    one, so that each gets its own gradient; None for those that the model does not have. The gradient goes back through
    bf16 products, but through attention in fp16, scaled by grad_scale and unscaled where q, k and v are turned back.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, cu, longest, c, wq, wk, wv, wo, bq, bk, bv, bo, q_norm, k_norm):
        rows, hq, hkv, d = x.shape[0], c.num_attention_heads, c.num_key_value_heads, c.head_dim
        w_qkv, w_o = stack([wq, wk, wv]), stack([wo])
        bias = None if bq is None else stack([bq, bk, bv], bq.dtype)
        q, k, v = (torch.empty(rows, n, d, dtype=FP16, device=x.device) for n in (hq, hkv, hkv))
        before = q if q_norm is None else torch.empty(rows, hq + hkv, d, dtype=BF16, device=x.device)
        rotate_kernel[(triton.cdiv(rows, 16), hq + 2 * hkv)](
            product(x, w_qkv.t()), cos if bias is None else bias, q, k, v, before, cos, cos, cos, sin,
            cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, c.rms_norm_eps, rows, 1, HQ=hq,
            HKV=hkv, D=d, MOST=1, BR=16, BD=triton.next_power_of_2(d), BIAS=bias is not None, NORM=q_norm is not None,
            KEEP=True, CACHE=False, num_warps=4)
        out, more = flash(q, k, v, cu, longest)
        y = product(out.flatten(1).to(BF16), w_o.t())
        if bo is not None:
            y += bo
        ctx.save_for_backward(x, cos, sin, cu, w_qkv, w_o, q, k, v, before, out, wq, wk, wv, wo, bq, bk, bv, bo,
                              q_norm, k_norm, *more)
        ctx.c, ctx.longest = c, longest
        return y

    @staticmethod
    def backward(ctx, dy):
        x, cos, sin, cu, w_qkv, w_o, q, k, v, before, out, wq, wk, wv, wo, bq, bk, bv, bo, q_norm, k_norm, *more = (
            ctx.saved_tensors)
        (rows, hq, d), hkv, c = q.shape, k.shape[1], ctx.c
        dy16 = dy.to(BF16)
        dwo = weight_grads(dy16, out.flatten(1).to(BF16), [wo])[0] if wo.requires_grad else None
        dbo = None if bo is None else dy.sum(0).to(bo.dtype)
        dout = dy16 @ w_o
        amax = torch.linalg.vector_norm(dout, float("inf"), dtype=FP32)
        scaled = torch.empty_like(out)
        scale_kernel[(triton.cdiv(dout.numel(), 2048),)](dout, amax, scaled, dout.numel(), BLOCK=2048, num_warps=4)
        dq, dk, dv = flash_backward(scaled, q, k, v, out, more, cu, ctx.longest)
        heads, tiles = hq + 2 * hkv, triton.cdiv(rows, 16)
        # without sums over tokens, a program a tile
        parts = min(tiles, 64) if bq is not None or q_norm is not None else tiles   # their sums are added at the end
        dqkv = torch.empty(rows, heads * d, dtype=BF16, device=x.device)
        dbias, dweight = (dqkv if p is None else torch.empty(parts, heads, d, device=x.device) for p in (bq, q_norm))
        rotate_backward_kernel[(parts, heads)](
            dq, dk, dv, amax, before, cos, sin, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,
            dqkv, dbias, dweight, c.rms_norm_eps, rows, triton.cdiv(tiles, parts), HQ=hq, HKV=hkv, D=d, BR=16,
            BD=triton.next_power_of_2(d), BIAS=bq is not None, NORM=q_norm is not None, num_warps=4)
        dws = weight_grads(dqkv, x, [wq, wk, wv]) if wq.requires_grad else (None,) * 3
        dbs, dnorms = (None,) * 3, (None,) * 2
        if bq is not None:
            dbs = dbias.sum(0).to(bq.dtype).flatten().split([hq * d, hkv * d, hkv * d])
        if q_norm is not None:
            sums = dweight.sum(0)
            dnorms = sums[:hq].sum(0).to(q_norm.dtype), sums[hq:hq + hkv].sum(0).to(k_norm.dtype)
        return dqkv @ w_qkv, None, None, None, None, None, *dws, dwo, *dbs, dbo, *dnorms


def attention(x, a, cos, sin, cu, longest):
    """
    model.Attention `a` on x (T, C) bf16 -> (T, C) fp32. cos, sin (T, D / 2); cu (sequences + 1,) int32: where the
    packed sequences begin and end, the longest of `longest` tokens.
    """
    linears = a.q_proj, a.k_proj, a.v_proj, a.o_proj
    norms = (a.q_norm.weight, a.k_norm.weight) if a.c.qk_norm else (None, None)
    return Attention.apply(x, cos, sin, cu, longest, a.c, *(m.weight for m in linears), *(m.bias for m in linears),
                           *norms)


class MLP(torch.autograd.Function):
    """Gate and up as one product, SwiGLU, down. keep: whether a backward pass will come (autograd hides it in here)."""

    @staticmethod
    def forward(ctx, x, keep, w_gate, w_up, w_down):
        w1, w2 = stack([w_gate, w_up]), stack([w_down])
        if not keep:
            return product(swiglu(product(x, w1.t())), w2.t())
        act, gate_up = swiglu(product(x, w1.t()), keep=True)
        ctx.save_for_backward(x, gate_up, act, w1, w2, w_gate, w_up, w_down)
        return product(act, w2.t())

    @staticmethod
    def backward(ctx, dy):
        x, gate_up, act, w1, w2, w_gate, w_up, w_down = ctx.saved_tensors
        dy = dy.to(BF16)
        dw_down = weight_grads(dy, act, [w_down])[0] if w_down.requires_grad else None
        d = swiglu_backward(gate_up, dy @ w2)
        dw = weight_grads(d, x, [w_gate, w_up]) if w_gate.requires_grad else (None, None)
        return d @ w1, None, *dw, dw_down


def mlp(x, m):
    """model.MLP `m` on x (T, C) bf16 -> (T, C) fp32."""
    return MLP.apply(x, torch.is_grad_enabled(), m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)


# ----------------------------------------------------------------------------------------------------------------------
# The head's loss: the logits are read once for log-prob and entropy, and once for their gradient


# A program a row of logits (R, V) fp32, BLOCK columns at a time. The softmax of one walk (arXiv 1805.02867, algorithm
# 3): `total` sums exp(z - top) for the largest z so far, and when a larger one comes, what was summed fades by exp(old
# - new). dot sums z exp(z - top) in the same way: entropy = log sum exp(z) - mean of z under the softmax.
@triton.jit
def head_stats_kernel(logits, targets, logp, entropy, lse, V, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    # each lane keeps its own maximum; they meet after the walk. Finite at the start: inf - inf would be NaN
    top, total, dot = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(logits + row * V + start + col, mask=start + col < V, other=float("-inf")) / temperature
        new = tl.maximum(top, z)
        fade, e = tl.exp(top - new), tl.exp(z - new)
        total = total * fade + e
        dot = dot * fade + tl.where(z == float("-inf"), 0.0, e * z)
        top = new
    peak = tl.max(top, 0)
    weight = tl.exp(top - peak)
    whole = tl.sum(total * weight, 0)
    sums = peak + tl.log(whole)
    z = tl.load(logits + row * V + tl.load(targets + row)) / temperature
    tl.store(logp + row, z - sums)
    tl.store(entropy + row, sums - tl.sum(dot * weight, 0) / whole)
    tl.store(lse + row, sums)


# Grid (R, blocks of V). g (R,): the gradient of each log-prob; lse (R,): log-sum-exp of the row, from head_stats
@triton.jit
def head_grad_kernel(logits, lse, targets, g, dlogits, V, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + col, mask=col < V, other=float("-inf")) / temperature
    # d logp_target / dz = onehot(target) - p
    d = tl.where(col == tl.load(targets + row), 1.0, 0.0) - tl.exp(z - tl.load(lse + row))
    d *= tl.load(g + row) / temperature
    tl.store(dlogits + row * V + col, d.to(dlogits.dtype.element_ty), mask=col < V)


def head_stats(logits, targets, temperature):
    """logits (R, V) fp32 before the temperature, targets (R,) -> log-prob, entropy in nats, log-sum-exp (R,)."""
    rows, v = logits.shape
    logp, entropy, lse = torch.empty(3, rows, device=logits.device)
    head_stats_kernel[(rows,)](logits, targets, logp, entropy, lse, v, temperature, BLOCK=2048, num_warps=8)
    return logp, entropy, lse


def head_grad(logits, lse, targets, g, temperature):
    """g (R,): the gradient of each target's log-prob -> that of the logits (R, V), bf16."""
    rows, v = logits.shape
    g = g.contiguous()   # the gradient of a plain sum is one number, seen R times
    out = torch.empty_like(logits, dtype=BF16)
    head_grad_kernel[(rows, triton.cdiv(v, 4096))](logits, lse, targets, g, out, v, temperature, BLOCK=4096,
                                                   num_warps=8)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Decode attention: one program turns a slot's new key and the query heads of its group, and reads the keys before it


# Grid (R, Hkv). qkv (S, R, (Hq + 2 Hkv) D) fp32; keys, values (slots, Hkv, length, D): row r is slot r, and its new
# ones are written at pos[r]; out (R, Hkv, G, D): G query heads share a key head, and so its keys are read once for all
# of them. The softmax of one walk again, over BN keys at a time, with the weighted values in `acc` (FlashAttention,
# arXiv 2205.14135, algorithm 1). It begins with the new token, which need not come back from memory.
@triton.jit(do_not_specialize=["rows", "S"])
def attend_kernel(qkv, bias, keys, values, pos, cos, sin, q_weight, k_weight, out, eps, length, scale, rows, S,
                  HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, BG: tl.constexpr,
                  BD: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = (G + 2) * HKV * D
    g, d, one = tl.arange(0, BG)[:, None], tl.arange(0, BD)[None, :], tl.arange(0, 1)[:, None]
    real, stride, new = (g < G) & (d < D), rows.to(tl.int64) * width, tl.load(pos + row)
    kind = keys.dtype.element_ty
    # (BG, BD): tensor cores want 16 rows
    at = (head * G + g) * D   # new + 0 * g: each head has the row's angle
    q = narrow(turned(qkv + row * width + at, stride, bias + at, q_weight, new + 0 * g, cos, sin, out, d, real, eps, S,
                      D, MOST, BIAS, NORM, False), kind)
    at = ((G * HKV + head) + one) * D
    k = narrow(turned(qkv + row * width + at, stride, bias + at, k_weight, new + 0 * one, cos, sin, out, d, d < D, eps,
                      S, D, MOST, BIAS, NORM, False), kind)
    at += HKV * D
    v = load_sum(qkv + row * width + at + d, d < D, stride, S, MOST)
    if BIAS:
        v += tl.load(bias + at + d, mask=d < D, other=0.0).to(tl.float32)
    v = narrow(v, kind)
    first = (row * HKV + head) * length * D
    tl.store(keys + first + new * D + d, k, mask=d < D)
    tl.store(values + first + new * D + d, v, mask=d < D)
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale        # in units of log2
    total = tl.full([BG], 1.0, tl.float32)
    acc = tl.zeros([BG, BD], tl.float32) + v.to(tl.float32)
    used = new.to(tl.int32)
    for start in range(0, used, BN):
        t = start + tl.arange(0, BN)
        some = (t[:, None] < used) & (d < D)
        place = first + t[:, None] * D + d
        kt = tl.load(keys + place, mask=some, other=0.0)
        vt = tl.load(values + place, mask=some, other=0.0)
        s = tl.dot(q, tl.trans(kt)) * scale                             # (BG, BN)
        s = tl.where(t[None, :] < used, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(kind), vt)
        top = new_top
    tl.store(out + (row * HKV + head) * G * D + g * D + d, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def attend(qkv, bias, keys, values, pos, cos, sin, norms, eps, hq):
    """
    qkv (S, R, (Hq + 2 Hkv) D) fp32, in S parts, and its bias or None; keys and values (slots, Hkv, T, D). Row r reads
    the first pos[r] tokens of slot r, and writes its own key and value behind them -> attention's output (R, Hq * D) in
    bf16. cos, sin (T, D / 2); norms: the weights (D,) of the two head norms, or None.
    """
    count, rows, _ = qkv.shape
    _, hkv, length, d = keys.shape
    out = torch.empty(rows, hq * d, dtype=BF16, device=qkv.device)
    q_weight, k_weight = norms or (cos, cos)
    group, bd = hq // hkv, max(16, triton.next_power_of_2(d))
    bn = 64 if rows * hkv >= 128 or bd > 128 else 128   # few programs leave much of the shared memory to each
    attend_kernel[(rows, hkv)](
        qkv, qkv if bias is None else bias, keys, values, pos, cos, sin, q_weight, k_weight, out, eps, length,
        d ** -0.5 * LOG2_E, rows, count, HKV=hkv, G=group, D=d, MOST=most_parts(count),
        BG=max(16, triton.next_power_of_2(group)), BD=bd, BN=bn, BIAS=bias is not None, NORM=norms is not None,
        num_warps=4, num_stages=stages(3, 4 * bn * bd, qkv.device))
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Sampling: the logits are read once. Blocks leave their maximum and sum; the CDF is then walked over block sums, and
# only the block that holds the token is read again.


# of engine.py, as signed numbers: a kernel reads constants of its own file only
GOLDEN, MIX1, MIX2 = (tl.constexpr(x - (1 << 64))
                      for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


# Grid (R, NB blocks of V) -> (R, NB) each: a block's largest logit, its sum of exp(z - largest), the place of the
# largest, and the sum of (z - largest) exp(z - largest), for the entropy
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


# A program a row: the block in which the CDF passes the row's uniform number, then the token inside it. A captured
# graph is replayed with the arguments it was captured with, so what changes from step to step lies in state and counter
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
    entropy at [counter] of the out tensors (K, slots). state (3, slots): token and position, moved on (the position to
    `last` at most), and the row's key. Greedy takes temperature 1.
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
