"""
Inference with a key/value cache: the sampler of every rollout and of every evaluation.

    engine = Engine(model, tokenizer)
    out = engine.generate(prompts, n=8, max_new=256, temperature=1.0, seed=0, step=3)
    out.ids, out.mask, out.logp      # (B, T), (B, T), (B, T-1); row b is sample b % n of prompt b // n

How it works. The cache has `slots` places of a fixed length; a live row owns one place, and the live rows own the first
ones. A prompt's keys and values are computed once (`extend`) and copied to the places of its n samples, all but its
last token: that one goes through the decode step like every later token, so there is one sampling path only. The host
looks every few steps. Then it ends rows, cuts a row at the token that completed a stop string, writes the keys of
injected text, gives free places to waiting rows, and moves rows down so that a short tail is cheap. On CUDA a decode
step is one captured graph, in bf16 of the kernels in fused.py, and the host looks at one chunk of steps while the
device runs the next; on CPU and MPS the same function runs eagerly.

Numbers. The steps are those of model.py: residual stream in fp32, products in `compute_dtype`, head with fp32 output;
with the kernels of fused.py the cache is fp16, as the keys and values of the trainer are.
A token is drawn by inverse CDF from one uniform number, a hash of (seed, step, prompt id, sample, position). So a
sample depends on its own prompt only and not on the rows beside it, up to the rounding of products and attention where
the number of rows changes. The weights are the model's own tensors: an in-place optimizer step is seen at once. An
adapter's product is added to a copy of the weights beside it, anew at each call.

Left out on purpose: top-k, top-p, penalties (the trainer's log-probs would be those of another distribution), beams,
paged memory (slots of one length read no more bandwidth), speculative decoding.
"""
import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from common import RunError, UserError, output_logits, round_stochastically
from model import head_factors, load_kernels, packed_attention, rms_norm, rope_angles

# ----------------------------------------------------------------------------------------------------------------------
# Random numbers: a hash, so that a sample's draws are the same in every batch, on every device and after a resume

MASK64 = (1 << 64) - 1


def signed(x):
    """The int64 with the bits of an unsigned 64-bit number; torch has no uint64 arithmetic, but int64 wraps alike."""
    return x - (1 << 64) if x >> 63 else x


GOLDEN, MIX1, MIX2 = signed(0x9E3779B97F4A7C15), signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix(x):
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014, figure 3): int64 tensor -> int64 tensor, a bijection."""
    for shift, factor in ((30, MIX1), (27, MIX2)):
        x = (x ^ ((x >> shift) & (MASK64 >> shift))) * factor   # the mask makes the arithmetic shift a logical one
    return x ^ ((x >> 31) & (MASK64 >> 31))


def absorb(key, value):
    """One more number into a hash. The state is mixed between two numbers, so (1, 2) and (2, 1) differ."""
    return mix((key + GOLDEN) ^ mix(torch.as_tensor(value, dtype=torch.int64) + GOLDEN))


def row_key(seed, step, prompt_id, sample):
    """The part of the hash that is the same for all tokens of a row -> int64 tensor."""
    key = torch.zeros((), dtype=torch.int64)
    for value in (seed, step, prompt_id, sample):
        key = absorb(key, value)
    return key


def key_uniform(key, position):
    """key, position: int64 tensors that broadcast -> fp32 in [0, 1), multiples of 2^-24 (all fp32 can hold evenly)."""
    bits = mix((key + GOLDEN) ^ mix(position + GOLDEN))
    return ((bits >> 40) & 0xFFFFFF).float() * 2.0 ** -24


def uniform(seed, step, prompt_id, sample, position):
    """
    The uniform number in [0, 1) that draws the token at index `position` of a row: fp32, of the broadcast shape.
    Arguments are ints or int64 tensors of one device; the result is the same on every device.
    """
    return key_uniform(row_key(seed, step, prompt_id, sample), torch.as_tensor(position, dtype=torch.int64))


def sample_tokens(logits, u, temperature=1.0, greedy=False, entropy=False):
    """
    logits (R, V) fp32, u (R,) in [0, 1) -> tokens (R,) int64, log-probs (R,), entropy (R,) in nats or None.

    Inverse CDF: the first token whose cumulated probability exceeds u. The log-prob is that of softmax(logits /
    temperature), the distribution that the token came from; greedy tokens get the one of temperature 1.
    """
    if temperature != 1.0 and not greedy:
        logits = logits / temperature
    p = torch.softmax(logits, dim=-1)
    if greedy:
        token = logits.argmax(dim=-1)
    else:
        # u is scaled by the last sum, which rounding leaves a little off 1. u <= 1 - 2^-24 keeps the target below that
        # sum, so the clamp acts only on NaN, which generate() reports
        cdf = p.cumsum(dim=-1)
        token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    logp = p.gather(1, token[:, None])[:, 0].log()
    return token, logp, torch.special.entr(p).sum(dim=-1) if entropy else None


# ----------------------------------------------------------------------------------------------------------------------
# What a call returns

@dataclass
class Rollout:
    """B = len(prompts) * n rows; row b is sample b % n of prompt b // n. All tensors are on the CPU."""
    ids: torch.Tensor             # (B, T) int64, right-padded with 0
    mask: torch.Tensor            # (B, T) bool, 1 where the policy sampled the token (prompt, injected, padding: 0)
    length: torch.Tensor          # (B,) tokens in the row: prompt + sampled + injected
    prompt_length: torch.Tensor   # (B,)
    logp: torch.Tensor            # (B, T-1) fp32; logp[:, t] scores ids[:, t+1] as it was sampled; 0 where mask is 0
    entropy: torch.Tensor | None  # (B, T-1) nats, aligned like logp
    finish: list                  # "eos" | "stop" | "length"
    # tokens_sampled, prompt_tokens, injected_tokens; prefill_s, decode_s (of the host, which on CUDA waits for tokens
    # only), wall_s; tokens_per_s (sampled / wall_s);
    # steps; slot_steps (steps x slots that ran; tokens_sampled / slot_steps is the share that was of use); path: "fused
    # kernels" (CUDA in bf16 with Triton), "flash" (without Triton), "plain" (everything else)
    stats: dict


GOING, EOS, STOP, LENGTH = range(4)
FINISH = (None, "eos", "stop", "length")


def round_up(x, multiple):
    return (x + multiple - 1) // multiple * multiple


# ----------------------------------------------------------------------------------------------------------------------
# Small parts

def project(h, x, linear, norm, eps, dtype):
    """h (R, C) fp32 + linear(x) -> the new h and its normalised form, the input of the next product."""
    weight, bias = linear
    if dtype == torch.float32 and bias is None:
        h = torch.addmm(h, x, weight.t())   # one call
    else:
        h = h + F.linear(x, weight, bias)   # bf16: the product is rounded before it is added, as in model.py
    return h, rms_norm(h, norm, eps, dtype)


def rotate(x, cos, sin):
    """x (R, H, D), cos and sin (R, 1, D) with sin's first half negative: the half-split rotation of model.py."""
    x32 = x.float()
    return torch.addcmul(x32 * cos, x32.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def merge(module, name, out):
    """
    A parameter of the module into `out`, in its dtype; with an adapter, W + scale B A. The sum is made in fp32. In bf16
    an entry of B A is mostly less than half the distance of two numbers near W, and rounding to the nearest would give
    back W: a sampler without the adapter. Rounded stochastically, every product has the sum as its expected value. The
    generator is seeded, so that the same adapter is the same sampler; where B is 0 the weights are W exactly.
    """
    weight = getattr(module, name).detach()
    if name != "weight" or getattr(module, "lora_A", None) is None:
        out.copy_(weight)
        return
    change = (module.lora_B.detach() @ module.lora_A.detach()).mul_(module.lora_scale).to(out.device)
    if out.dtype != torch.bfloat16:
        out.copy_(weight.to(out.device) + change)
        return
    # W as the trainer's products read it, in the dtype of `out`
    change.add_(weight.to(out.device, out.dtype))
    round_stochastically(change, out, torch.Generator(out.device).manual_seed(0))


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def flash_works(config, dtype, device):
    """
    Whether this torch has the private flash call that reads a slot cache in place (`seqused_k`), and it is right: two
    rows against plain attention. Private, so it may change; then decode() takes the masked path.
    """
    hkv, d = config.num_key_value_heads, config.head_dim
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*s, generator=gen).to(device, dtype) for s in (
        (2, config.num_attention_heads, d), (3, hkv, 64, d), (3, hkv, 64, d)))
    shape, stride = ((2 * hkv + 1) * 64, hkv, d), (d, 64 * d, 1)
    cu_q, slot, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 1, 2), (2, 0, 0), (5, 40)))
    try:
        got = torch.ops.aten._flash_attention_forward(
            q, k.as_strided(shape, stride), v.as_strided(shape, stride), cu_q, slot * (hkv * 64), 1, 64, 0.0, False,
            False, seqused_k=used)[0]
    except (RuntimeError, TypeError):   # no such argument, or no kernel for this shape or GPU
        return False
    for i, (s, n) in enumerate(((2, 5), (0, 40))):
        want = F.scaled_dot_product_attention(q[i][:, None].float(), k[s, :, :n].float(), v[s, :, :n].float(),
                                              enable_gqa=True)[:, 0]
        if not torch.allclose(got[i].float(), want, atol=2e-2):
            return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The engine

ROW_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)   # one captured graph each; above 512 rows, multiples of 512
EXTEND_TOKENS = 8192                        # prompt tokens of one packed forward: bounds the memory it takes


class Engine:
    """
    model: a Transformer; its weights are shared, not copied, where they already have the compute dtype and the device.
    tokenizer: needed for stop strings only. slots: rows that are decoded at a time. context: tokens a slot may hold
    when text is injected (default: the model's, at most 2048); a call that needs more for prompt + max_new gets it.
    """

    def __init__(self, model, tokenizer=None, slots=64, context=None, device=None):
        c = model.config
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.device = torch.device(device) if device is not None else model.device
        self.context = min(context or 2048, c.max_position_embeddings)
        self.look = 8 if self.device.type != "cpu" else 4   # decode steps between two looks of the host
        # A refill on a GPU is some hundred launches however few rows it brings, so it waits until a few have ended
        self.refill = max(1, slots // 16) if self.device.type == "cuda" else 1
        self.ahead = int(self.device.type == "cuda")        # chunks of steps that run while the host reads another
        self.kv = None                                      # (2, L, S, Hkv, T, D): keys and values
        self.piece_ends = {}                                # stop strings -> which tokens can complete one of them
        self.checks = 0                                     # calls of check_weights
        self.load()

    # Weights ----------------------------------------------------------------------------------------------------------

    def load(self):
        """Collects the weights: fused where several products read the same input."""
        self.dtype, self.graphs = self.model.compute_dtype, {}
        self.shared = []   # (module, attribute, where its parameter must live)
        self.copied = []   # (our copy in another dtype or on another device, modules, attribute)
        fp32, dtype, body, c = torch.float32, self.dtype, self.model.model, self.model.config

        half = self.device.type == "cuda" and dtype != fp32
        self.flash = half and flash_works(c, torch.float16 if load_kernels() else dtype, self.device)
        self.fused = load_kernels() if self.flash and dtype == torch.bfloat16 else None   # fused.py, or the plain path

        def linear(*modules):
            bias = modules[0].bias   # the kernels add it to an fp32 sum, as it is
            return self.take(modules, dtype), None if bias is None else self.take(
                modules, bias.dtype if self.fused else dtype, "bias")

        self.layers = []
        for layer in body.layers:
            a, m = layer.self_attn, layer.mlp
            w = SimpleNamespace(norm1=self.take([layer.input_layernorm], fp32),
                                norm2=self.take([layer.post_attention_layernorm], fp32),
                                qkv=linear(a.q_proj, a.k_proj, a.v_proj), o=linear(a.o_proj),
                                gate_up=linear(m.gate_proj, m.up_proj), down=linear(m.down_proj))
            if c.qk_norm:
                w.q_norm, w.k_norm = self.take([a.q_norm], fp32), self.take([a.k_norm], fp32)
            self.layers.append(w)
        self.norm = self.take([body.norm], fp32)
        self.embed = self.take([body.embed_tokens], body.embed_tokens.weight.dtype)
        head = body.embed_tokens if c.tie_word_embeddings else self.model.lm_head
        self.head = self.take([head], head_factors(head.weight) if self.fused else dtype)
        # on CPU output_logits would widen a bf16 head at each step
        self.head32 = self.head.float() if self.device.type == "cpu" and dtype != fp32 else None
        self.kv_dtype = torch.float16 if self.fused else dtype

    def take(self, modules, dtype, name="weight"):
        """
        -> one tensor with the modules' weights under each other in dim 0. Where they have the dtype and the device
        already, they become views of it, so that the trainer's in-place updates are the engine's; else, and where one
        of them has an adapter, it is a copy that refresh() makes again.
        """
        params = [getattr(m, name) for m in modules]
        extra = {n for m in modules for n, _ in m.named_parameters()} - {"weight", "bias", "lora_A", "lora_B"}
        if extra:   # leaving it out would sample from another model than the trainer's
            raise TypeError(f"{type(modules[0]).__name__} has a parameter that the engine does not know: {min(extra)}")
        adapted = name == "weight" and any(getattr(m, "lora_A", None) is not None for m in modules)
        if adapted or any(p.dtype != dtype or p.device != self.device for p in params):
            fused = torch.empty(sum(p.shape[0] for p in params), *params[0].shape[1:], dtype=dtype, device=self.device)
            self.copied.append((fused, modules, name))
            self.copy_again(fused, modules, name)
            return fused
        first, rows = params[0].detach(), sum(p.shape[0] for p in params)
        ends = [p.data_ptr() + p.numel() * p.element_size() for p in params]
        if all(p.is_contiguous() and p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
               for p in params) and all(end == p.data_ptr() for end, p in zip(ends, params[1:])):
            fused = first.as_strided((rows, *first.shape[1:]), first.stride())   # fused before, by another engine
        else:
            fused = torch.cat([p.detach() for p in params])
        for m, p, view in zip(modules, params, fused.split([p.shape[0] for p in params])):
            p.data = view
            self.shared.append((m, name, view))
        return fused

    @torch.no_grad()
    def copy_again(self, fused, modules, name):
        for m, part in zip(modules, fused.split([getattr(m, name).shape[0] for m in modules])):
            merge(m, name, part)

    @torch.no_grad()
    def refresh(self):
        """
        Makes the engine's weights those of the model; called at the start of each generate. Storage stays where it is,
        so captured graphs stay valid. Shared weights need nothing, unless someone gave a parameter new storage
        (`p.data = ...`, load_state_dict(assign=True)): its values then move into ours.
        """
        now = [(getattr(m, name), view) for m, name, view in self.shared]
        if self.dtype != self.model.compute_dtype or any(p.dtype != view.dtype or p.device != view.device
                                                         for p, view in now):
            return self.load()
        if any(name == "weight" and getattr(m, "lora_A", None) is not None for m, name, _ in self.shared):
            return self.load()   # an adapter that came after the engine
        for p, view in now:
            if p.data_ptr() != view.data_ptr():
                view.copy_(p)
                p.data = view
        for copied in self.copied:
            self.copy_again(*copied)
        if self.head32 is not None:
            self.head32.copy_(self.head)

    @torch.no_grad()
    def check_weights(self):
        """
        RunError where the engine's weights are not the model's: what is shared must lie where the model's does, and at
        each call another one of the copies is made again and compared. Log-probs alone would not tell: in bf16 many
        small updates hide in the rounding. The head, by far the largest, is left out.
        """
        stale = any(getattr(m, name).data_ptr() != view.data_ptr() for m, name, view in self.shared)
        if some := [copied for copied in self.copied if copied[0] is not self.head]:
            mine, modules, name = some[self.checks % len(some)]
            again = torch.empty_like(mine)
            self.copy_again(again, modules, name)
            stale |= not torch.equal(again.view(torch.uint8), mine.view(torch.uint8))   # bits, since NaN != NaN
        if stale:
            raise RunError("the sampler's weights are not those of the model: they were not refreshed")
        self.checks += 1

    # Memory -----------------------------------------------------------------------------------------------------------

    def reserve(self, slots, length, keep=True):
        """At least `slots` places of `length` tokens; keep: with what they hold now."""
        c, old = self.model.config, self.kv
        if old is not None:
            if old.shape[2] >= slots and old.shape[4] >= length and old.dtype == self.kv_dtype:
                return
            # half as much again, so that rows that grow by injection do not move at every look
            length = max(old.shape[4], length if old.shape[4] >= length else max(length, old.shape[4] * 3 // 2))
            slots = max(slots, old.shape[2])
            if not keep:
                old = self.kv = None   # freed before its successor is made
        length = round_up(length, 64)
        shape = (2, c.num_hidden_layers, slots, c.num_key_value_heads, length, c.head_dim)
        # zeros, not empty: a masked position's weight is 0, and 0 * NaN is NaN
        self.kv = torch.zeros(shape, dtype=self.kv_dtype, device=self.device)
        d, on, state = self.device, {"device": self.device}, getattr(self, "state", None)
        self.state = torch.zeros(3, slots, dtype=torch.int64, **on)   # per slot: last token, its position, row key
        if old is not None and old.dtype == self.kv_dtype:
            self.kv[:, :, :old.shape[2], :, :old.shape[4]] = old
            self.state[:, :old.shape[2]] = state   # ahead of the host's while a chunk is under way
        self.graphs = {}
        self.u = torch.zeros(self.look, slots, **on)                  # uniform numbers of the next steps
        # token, log-prob, entropy of the last steps; the floats by their bits, so that one copy brings all to the host
        self.out = torch.zeros(3, self.look, slots, dtype=torch.int32, **on)
        self.out_logp, self.out_entropy = self.out[1].view(torch.float32), self.out[2].view(torch.float32)
        self.counter = torch.zeros(1, dtype=torch.int64, **on)        # step inside the chunk, for the captured graph
        cos, sin = rope_angles(torch.arange(length, device=d), c.head_dim, c.rope_theta)
        if self.fused:
            self.cos, self.sin = cos, sin   # (T, D / 2)
        else:
            self.cos, self.sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]   # (T, 1, D)
        # first row of (slot, head) in the cache seen as (S * Hkv * T, D)
        self.base = torch.arange(slots * c.num_key_value_heads, device=d).view(slots, -1) * length
        if self.flash and not self.fused:
            self.cu_q = torch.arange(slots + 1, dtype=torch.int32, device=d)
            self.cu_k = self.cu_q * (c.num_key_value_heads * length)

    # The network ------------------------------------------------------------------------------------------------------

    def blocks(self, ids, pos, places, attend):
        """
        ids, pos (R,): tokens and their positions; places (R * Hkv,): where each new key goes in the cache;
        attend(layer, q, k, v) -> (R, Hq * D); with fused.py k and v are None, they lie in the cache already. places and
        attend None: row r is the next token of slot r, by the decode kernel. -> hidden states (R, C) after the last
        norm, as the head takes them. The steps of Transformer.forward.
        """
        c, eps, dtype = self.model.config, self.model.config.rms_norm_eps, self.dtype
        hq, hkv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        h = F.embedding(ids, self.embed).float()
        norms = [w.norm1 for w in self.layers[1:]] + [self.norm]   # what follows each layer
        if self.fused:
            f, dtypes = self.fused, [dtype] * (len(self.layers) - 1) + [self.head.dtype]
            few = len(ids) <= f.FEW
            x = f.add_norm_in_place(h, None, self.layers[0].norm1, eps, dtype)
            for i, (w, norm, kind) in enumerate(zip(self.layers, norms, dtypes)):
                head_norms = (w.q_norm, w.k_norm) if c.qk_norm else None
                qkv = f.product_parts(x, w.qkv[0], few)
                if places is None:
                    y = f.attend(qkv, w.qkv[1], self.kv[0, i], self.kv[1, i], pos, self.cos, self.sin, head_norms, eps,
                                 hq)
                else:
                    y = attend(i, f.rotate_store(qkv, w.qkv[1], self.kv[0, i], self.kv[1, i], pos, places, self.cos,
                                                 self.sin, head_norms, eps, hq, hkv), None, None)
                y = f.product_parts(y, w.o[0], few)
                if w.o[1] is not None:
                    y[0] += w.o[1]   # once, in the first part of the sum
                x = f.add_norm_in_place(h, y, w.norm2, eps, dtype)
                x = f.gated(x, w.gate_up[0], few)
                x = f.add_norm_in_place(h, f.product_parts(x, w.down[0], few), norm, eps, kind)
            return x
        cos, sin = self.cos[pos], self.sin[pos]   # (R, 1, D)
        x = rms_norm(h, self.layers[0].norm1, eps, dtype)
        for i, (w, norm) in enumerate(zip(self.layers, norms)):
            qkv = F.linear(x, *w.qkv).view(-1, hq + 2 * hkv, d)
            qk, v = qkv[:, :hq + hkv], qkv[:, hq + hkv:]
            if c.qk_norm:
                qk = torch.cat((rms_norm(qk[:, :hq], w.q_norm, eps, dtype),
                                rms_norm(qk[:, hq:], w.k_norm, eps, dtype)), dim=1)
            qk = rotate(qk, cos, sin)
            q, k = qk[:, :hq], qk[:, hq:]
            self.kv[0, i].view(-1, d).index_copy_(0, places, k.reshape(-1, d))
            self.kv[1, i].view(-1, d).index_copy_(0, places, v.reshape(-1, d))
            h, x = project(h, attend(i, q, k, v), w.o, w.norm2, eps, dtype)
            h, x = project(h, swiglu(F.linear(x, *w.gate_up)), w.down, norm, eps, dtype)
        return x

    @torch.inference_mode()
    def extend(self, jobs):
        """
        jobs: (slot, start, tokens) -> nothing; writes the keys and values of `tokens` at start, start + 1, ... of the
        slot. Serves prompts (start 0) and injected text. No logits: a row's last token goes through decode().
        """
        jobs = [job for job in jobs if len(job[2])]
        while jobs:
            pack, total = [], 0
            while jobs and (not pack or total + len(jobs[0][2]) <= EXTEND_TOKENS):
                pack.append(jobs.pop(0))
                total += len(pack[-1][2])
            self.extend_pack(pack)

    def extend_pack(self, pack):
        slots, starts = [job[0] for job in pack], [job[1] for job in pack]
        lengths = [len(job[2]) for job in pack]
        ids = self.send(np.concatenate([np.asarray(job[2], dtype=np.int64) for job in pack]))
        slot = self.send(np.repeat(np.array(slots), lengths))
        pos = self.send(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)]))
        cu = self.send(np.cumsum([0] + lengths).astype(np.int32))
        if self.flash:
            cu_k = self.send(np.array(slots + [0], dtype=np.int32)) * (self.kv.shape[3] * self.kv.shape[4])
            used = self.send(np.array([s + n for s, n in zip(starts, lengths)], dtype=np.int32))

            def attend(i, q, k, v):
                return self.flash_attention(i, q, cu, cu_k, max(lengths), used, causal=True)
        elif not any(starts):
            def attend(i, q, k, v):
                return packed_attention(q, k, v, lengths, cu).flatten(1)
        else:
            def attend(i, q, k, v):
                out = []
                for part, s, start, n in zip(q.split(lengths), slots, starts, lengths):
                    seen = torch.ones(n, start + n, dtype=torch.bool, device=self.device).tril(start)
                    out.append(F.scaled_dot_product_attention(
                        part.transpose(0, 1)[None], self.kv[0, i, s, :, :start + n][None],
                        self.kv[1, i, s, :, :start + n][None], attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
                return torch.cat(out).flatten(1)
        self.blocks(ids, pos, (self.base[slot] + pos[:, None]).view(-1), attend)

    def flash_attention(self, layer, q, cu_q, cu_k, max_q, used, causal):
        """Reads slots in place: cu_k holds where each row's slot begins, `used` how many tokens of it count."""
        _, _, slots, hkv, length, d = self.kv.shape
        # (token, head, D) seen over the (slot, head, token, D) cache: the heads of a slot are `length` tokens apart
        shape, stride = (((slots - 1) * hkv + 1) * length, hkv, d), (d, length * d, 1)
        keys, values = self.kv[0, layer].as_strided(shape, stride), self.kv[1, layer]
        values = values.as_strided(shape, stride)
        return torch.ops.aten._flash_attention_forward(q, keys, values, cu_q, cu_k, max_q, length, 0.0, causal, False,
                                                       seqused_k=used)[0].flatten(1).to(self.dtype)

    def decode(self, rows, length, j, temperature, greedy, entropy):
        """
        One step of the first `rows` slots, whose tokens lie in the first `length` places (read by the plain path
        alone): last token in, next token into out[:, j] and state. j is a tensor in a captured graph. Nothing here
        waits for the host.
        """
        c = self.model.config
        hkv, group, d = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads, c.head_dim
        token, pos = self.state[0, :rows], self.state[1, :rows]
        places = None if self.fused else (self.base[:rows] + pos[:, None]).view(-1)
        if self.fused:
            attend = None
        elif self.flash:
            used = (pos + 1).int()

            def attend(i, q, k, v):
                return self.flash_attention(i, q, self.cu_q[:rows + 1], self.cu_k[:rows + 1], 1, used, causal=False)
        else:
            # the query heads of a group become query positions of one head: no copy of keys and values
            bias = torch.zeros(rows, 1, 1, length, dtype=self.dtype, device=self.device).masked_fill_(
                torch.arange(length, device=self.device) > pos[:, None, None, None], float("-inf"))
            by_hand = self.dtype == torch.float32 and (group > 1 or self.device.type != "cpu")

            def attend(i, q, k, v):
                q = q.reshape(rows, hkv, group, d)
                keys, values = self.kv[0, i, :rows, :, :length], self.kv[1, i, :rows, :, :length]
                if by_hand:   # measured on CPU in fp32: half the time of the fused kernel, except for a group of one
                    score = torch.matmul(q * d ** -0.5, keys.transpose(-1, -2)).add_(bias)
                    return torch.matmul(torch.softmax(score, dim=-1), values).view(rows, -1)
                return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias).reshape(rows, -1)
        x = self.blocks(token, pos, places, attend)
        logits = output_logits(x, self.head) if self.head32 is None else F.linear(x.float(), self.head32)
        if self.fused:
            return self.fused.sample(logits, self.state, j, self.out[0], self.out_logp, self.out_entropy, temperature,
                                     greedy, self.kv.shape[4] - 1)
        u = self.u[j, :rows].view(-1) if isinstance(j, int) else self.u.index_select(0, j)[0, :rows]
        token, logp, ent = sample_tokens(logits, u, temperature, greedy, entropy)
        for out, value in ((self.out[0], token.int()), (self.out_logp, logp), (self.out_entropy, ent)):
            if value is not None:
                if isinstance(j, int):
                    out[j, :rows] = value
                else:
                    out[:, :rows].index_copy_(0, j, value[None])
        self.state[0, :rows] = token
        # a row that ended inside the chunk runs on until the host looks; the clamp keeps its writes in its own slot
        self.state[1, :rows] = (pos + 1).clamp_(max=self.kv.shape[4] - 1)

    def send(self, array):
        """A numpy array -> the same on the device. Nothing waits: on CUDA the copy is one more thing in the queue."""
        x = torch.from_numpy(array)
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    @torch.inference_mode()
    def launch(self, rows, steps, state, fresh, length, temperature, greedy, entropy):
        """
        Starts `steps` steps of `rows` slots, those in `fresh` from the host's state (3, rows), the others from where
        the device left them -> what read() turns into tokens, log-probs and entropies. length: tokens of the longest
        row, which bounds an eager step.
        """
        if len(fresh) == rows:
            self.state[:, :rows] = self.send(state)
        elif len(fresh):
            self.state[:, self.send(fresh)] = self.send(state[:, fresh])
        if not self.fused:   # the fused sampler hashes by itself
            at = self.state[1, :rows] + torch.arange(1, steps + 1, device=self.device)[:, None]
            self.u[:steps, :rows] = key_uniform(self.state[2, :rows], at)
        if self.device.type != "cuda":
            length = min(round_up(length, 32), self.kv.shape[4])
            for j in range(steps):
                self.decode(rows, length, j, temperature, greedy, entropy)
            return self.out[:, :steps, :rows].to("cpu", copy=True), None
        self.counter.zero_()
        graph = self.graph(rows, temperature, greedy, entropy)
        for _ in range(steps):
            graph.replay()
        out = torch.empty(3, steps, rows, dtype=torch.int32, pin_memory=True)
        out.copy_(self.out[:, :steps, :rows], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return out, done

    def read(self, out, done):
        """Waits for the steps of a launch -> tokens, log-probs, entropies (K, R)."""
        if done is not None:
            done.synchronize()
        token, logp, ent = out.numpy()
        return token, logp.view(np.float32), ent.view(np.float32)

    def graph(self, rows, temperature, greedy, entropy):
        """The captured decode step of `rows` slots, made on first use."""
        key = (rows, temperature, greedy, entropy and not self.fused)   # the fused sampler has the entropy anyway
        if key not in self.graphs:
            saved = self.state.clone()

            def step():
                self.decode(rows, self.kv.shape[4], self.counter, temperature, greedy, entropy)
                self.counter += 1
            side = torch.cuda.Stream(self.device)   # warm-up off the main stream, as capture demands
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None   # one pool: they run in turn
            with torch.cuda.graph(graph, pool=pool):
                step()
            self.graphs[key] = graph
            self.state.copy_(saved)
            self.counter.zero_()
        return self.graphs[key]

    # Generation -------------------------------------------------------------------------------------------------------

    def bucket(self, rows):
        """How many slots a decode step runs for `rows` live rows. Eager steps fit exactly; graphs come in sizes."""
        if self.device.type != "cuda":
            return rows
        fit = next((b for b in ROW_BUCKETS if b >= rows), round_up(rows, ROW_BUCKETS[-1]))
        return min(fit, self.kv.shape[2])

    def generate(self, prompts, n=1, *, max_new, temperature=1.0, seed=0, step=0, prompt_ids=None, eos_ids=None,
                 stop=(), on_stop=None, entropy=False, greedy=False, progress=None):
        """
        prompts: lists of token ids -> Rollout with n samples of each.

        max_new: sampled tokens a row at most, an int or one a row. prompt_ids: one integer a prompt, its identity for
        the random numbers (default: its index). eos_ids: ids that end a row (default: the model's; () for none). stop:
        strings; the row is cut at the token that completes one, and that token stays whole. on_stop(row, text, stop) ->
        token ids to inject before sampling goes on, or None to end the row; text is what was sampled since the prompt
        or the last injection. Where the injected ids do not fit the context, or no token may follow, the row ends as
        "length".
        progress(rows finished, rows, tokens sampled) is called at every look.
        Errors: UserError for an empty or over-long prompt, ids outside the vocabulary and settings out of range.
        """
        began = time.perf_counter()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        eos = np.array(sorted(self.model.eos_ids if eos_ids is None else eos_ids), dtype=np.int64)
        prompt_ids = list(range(len(prompts))) if prompt_ids is None else list(prompt_ids)
        max_new = np.broadcast_to(np.asarray(max_new, dtype=np.int64), len(prompts) * n)   # (B,)
        need = self.check(prompts, n, max_new, temperature, prompt_ids)
        if stop and self.tokenizer is None or "" in stop:
            raise UserError(f"generate: stop {stop} needs an engine with a tokenizer, and strings that are not empty")
        self.refresh()
        self.check_weights()
        b, most = len(prompts) * n, max(self.context, need) if on_stop else need
        # Injected text makes lengths unknown: a graph wants its memory to stay, an eager step can let it grow
        self.reserve(min(self.slots, b), most if on_stop and self.device.type == "cuda" else need, keep=False)
        keys = row_key(seed, step, torch.tensor(prompt_ids)[:, None], torch.arange(n)).flatten().numpy()
        run = Rows(prompts, n, most, keys, entropy)
        slot_row = np.full(self.kv.shape[2], -1)       # row that owns the slot, -1 when free
        slot_prompt = np.full(self.kv.shape[2], -1)    # prompt whose keys the slot begins with; new at each call, since
        usable = min(self.slots, self.kv.shape[2])     # the weights may have changed
        fresh = np.ones(self.kv.shape[2], dtype=bool)  # slots whose state the host knows and the device does not
        flying = deque()                               # chunks that were started and not read
        promised = np.zeros(b, dtype=np.int64)         # tokens of each row in them
        # The host is late: while it reads a chunk of steps the device runs the next one (`ahead`; on CPU none). So the
        # device's state leads and the host's is sent for fresh slots only; `length + promised` is where a row may be by
        # now, `room` what it may still start; and when a look ends a row or injects text, its tokens in the chunks that
        # are still flying are dropped. The tokens are those of a host that never is late.
        waiting, stats = 0, {"prefill_s": 0.0, "decode_s": 0.0, "steps": 0, "slot_steps": 0}
        while True:
            # admit: rows in order, into the lowest free slots
            clock = time.perf_counter()
            free = np.flatnonzero(slot_row[:usable] < 0)[:b - waiting]
            if len(free) and (len(free) >= min(self.refill, b - waiting) or (slot_row < 0).all()):
                slot_row[free] = np.arange(waiting, waiting + len(free))
                waiting += len(free)
                self.admit(free, slot_row[free] // n, prompts, slot_prompt)
                fresh[free] = True
                stats["prefill_s"] += time.perf_counter() - clock
            live = np.flatnonzero(slot_row >= 0)
            if not len(live) and not flying:
                break
            slot_prompt[slot_row < 0] = -1   # a graph's idle slots are written to
            # compact: live rows beyond the slots of the next step move into holes below
            size = self.bucket(len(live))
            high, holes = live[live >= size], np.flatnonzero(slot_row[:size] < 0)
            if len(high):
                holes = holes[:len(high)]
                used = int((run.length + promised)[slot_row[high]].max())
                self.copy_slots(high, holes, used)
                slot_row[holes], slot_prompt[holes], fresh[holes] = slot_row[high], slot_prompt[high], fresh[high]
                slot_row[high], fresh[high] = -1, True
            # decode a few steps
            clock = time.perf_counter()
            rows = slot_row[:size].copy()
            room = run.room(rows, max_new, most) - np.where(rows >= 0, promised[rows], 0)
            steps = int(min(self.look, room.max(initial=0)))
            if steps > 0:
                if not flying:
                    fresh[:] = True   # the host has seen all
                longest = int((run.length + promised)[rows[rows >= 0]].max()) + steps
                self.reserve(0, longest)
                out = self.launch(size, steps, run.state(rows), np.flatnonzero(fresh[:size]), longest,
                                  float(temperature), greedy, entropy)
                fresh[:size] = False
                take = np.clip(room, 0, steps)
                promised[rows[rows >= 0]] += take[rows >= 0]
                flying.append((rows, take, out))
                stats["steps"] += steps
                stats["slot_steps"] += steps * size
                if on_stop is None:   # a row that reaches its length leaves now: nothing in its tokens can prolong it
                    gone = np.flatnonzero((rows >= 0) & (room <= steps))
                    slot_row[gone], fresh[gone] = -1, True
            if steps > 0 and len(flying) <= self.ahead:
                continue
            rows, take, out = flying.popleft()
            tokens, logps, ents = self.read(*out)
            stats["decode_s"] += time.perf_counter() - clock
            # look: end rows, cut at stops, inject
            take = np.where(rows >= 0, take, 0)
            promised[rows[rows >= 0]] -= take[rows >= 0]
            took = run.append(rows, tokens, logps, ents, take, eos)
            jobs = []
            for i in self.stop_candidates(tokens, took, stop):
                for start, ids in self.handle_stop(run, rows[i], took[i], stop, on_stop, max_new, most):
                    jobs.append((int(np.flatnonzero(slot_row == rows[i])[0]), start, ids))
            if jobs:
                clock = time.perf_counter()
                self.reserve(0, max(start + len(ids) + 1 for _, start, ids in jobs))
                self.extend(jobs)
                stats["prefill_s"] += time.perf_counter() - clock
            full = rows[(rows >= 0) & (run.room(rows, max_new, most) <= 0)]
            run.finish[full[run.finish[full] == GOING]] = LENGTH
            # what is under way for a row that ended, or that went on from elsewhere, never happened
            ended = rows[(rows >= 0) & (run.finish[rows] != GOING)]
            changed = np.concatenate((ended, slot_row[[slot for slot, _, _ in jobs]]))
            if len(changed):
                promised[changed] = 0
                fresh[np.isin(slot_row, changed)] = True
                slot_row[np.isin(slot_row, ended)] = -1
            for other, _, _ in flying:
                other[np.isin(other, changed)] = -1
            if progress is not None:
                progress(int((run.finish != GOING).sum()), b, int(run.sampled.sum()))
        stats["wall_s"] = time.perf_counter() - began
        return run.result(stats, self)

    def check(self, prompts, n, max_new, temperature, prompt_ids):
        """-> tokens that the longest row may hold; UserError for what cannot be sampled."""
        c = self.model.config
        if not prompts:
            raise UserError("generate: no prompts")
        if n < 1 or max_new.min() < 1:
            raise UserError(f"generate: n {n} and max_new {max_new.min() if n > 0 else ''} must be at least 1")
        if not 0 < temperature < float("inf"):
            raise UserError(f"generate: temperature {temperature} must be above 0 and finite (greedy=True for argmax)")
        if len(prompt_ids) != len(prompts):
            raise UserError(f"generate: {len(prompt_ids)} prompt_ids for {len(prompts)} prompts")
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(f"generate: prompt {i} is empty")
            if min(prompt) < 0 or max(prompt) >= c.vocab_size:
                raise UserError(f"generate: prompt {i} holds token {min(prompt) if min(prompt) < 0 else max(prompt)}, "
                                f"outside the vocabulary of {c.vocab_size}")
        total = np.repeat([len(p) for p in prompts], n) + max_new
        need, i = int(total.max()), int(total.argmax())
        if need > c.max_position_embeddings:
            raise UserError(f"prompt {i // n} has {need - max_new[i]} tokens, with max_new {max_new[i]} that is "
                            f"{need}, and the model's context is {c.max_position_embeddings}: drop the prompt or lower "
                            f"max_new")
        return need

    def admit(self, slots, numbers, prompts, slot_prompt):
        """Gives each slot the keys of its prompt but for the last token: computed once a prompt, then copied."""
        other = slots[slot_prompt[slots] != numbers]
        slot_prompt[other] = -1   # overwritten below, so no source for a copy
        jobs, sources, targets, longest = [], [], [], 0
        for number in dict.fromkeys(numbers.tolist()):
            want = slots[(numbers == number) & (slot_prompt[slots] != number)]
            held = np.flatnonzero(slot_prompt == number)
            if not len(held) and len(want):
                jobs.append((int(want[0]), 0, prompts[number][:-1]))
                held, want = want[:1], want[1:]
            if len(want):
                sources += [held[0]] * len(want)
                targets += want.tolist()
                longest = max(longest, len(prompts[number]) - 1)
        slot_prompt[slots] = numbers
        self.extend(jobs)
        self.copy_slots(sources, targets, longest)

    @torch.inference_mode()
    def copy_slots(self, sources, targets, length):
        """Copies state and the first `length` places; what lies beyond a row's length is overwritten as it grows."""
        each = max(1, EXTEND_TOKENS * 2 // max(length, 1))   # slots at a time: bounds the memory of the gather
        for i in range(0, len(sources) if length else 0, each):
            source, target = (self.send(np.asarray(x[i:i + each])) for x in (sources, targets))
            self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]
            self.state[:, target] = self.state[:, source]

    # Stop strings -----------------------------------------------------------------------------------------------------

    def text(self, ids):
        return self.tokenizer.decode([int(t) for t in ids], skip_special_tokens=False)

    def stop_candidates(self, tokens, took, stop):
        """
        tokens (K, R) of the last steps, took (R,) how many count -> slots in which a stop string may be complete. The
        token that completes one holds its last character, which is looked up in a table that fills as tokens appear.
        """
        if not stop:
            return ()
        ends = "".join({s[-1] for s in stop})
        if not ends.isascii() or " " in ends:   # part of a character, or a space that a tokenizer may hide
            return np.flatnonzero(took)
        table = self.piece_ends.setdefault(ends, np.full(self.model.config.vocab_size, -1, dtype=np.int8))
        for t in np.unique(tokens[table[tokens] < 0]):
            table[t] = any(e in self.text([t]) for e in ends)
        counts = np.arange(tokens.shape[0])[:, None] < took
        return np.flatnonzero(((table[tokens] > 0) & counts).any(axis=0))

    def handle_stop(self, run, row, took, stop, on_stop, max_new, most):
        """Cuts the row where a stop string is complete, asks on_stop how to go on -> [(start, ids)] for extend()."""
        start, length = run.segment[row], run.length[row] - (run.finish[row] == EOS)
        if not any(s in self.text(run.ids[row, start:length]) for s in stop):
            return []
        for end in range(max(run.length[row] - took, start) + 1, length + 1):
            text = self.text(run.ids[row, start:end])
            found = [s for s in stop if s in text]
            if found:
                break
        run.cut(row, end)   # what was sampled after it, an eos too, never happened
        inject = None if on_stop is None else on_stop(int(row), text, min(found, key=text.index))
        if inject and not 0 <= min(inject) <= max(inject) < self.model.config.vocab_size:
            raise ValueError(f"on_stop gave ids from {min(inject)} to {max(inject)}, outside the vocabulary of "
                             f"{self.model.config.vocab_size}")
        if inject is None:
            run.finish[row] = STOP
        elif end + len(inject) > most:
            run.finish[row] = LENGTH
        else:
            run.inject(row, inject)
            if run.room(np.array([row]), max_new, most)[0] > 0:
                # from the stop's last token on: its keys may not have been written, the last injected one's will be
                return [(int(end) - 1, run.ids[row, end - 1:run.length[row] - 1])]
        return []


class Rows:
    """The host's record of a call: all rows from prompt to finish. NumPy, since it is written in small pieces."""

    def __init__(self, prompts, n, most, keys, entropy):
        b = len(prompts) * n
        self.keys = keys
        self.prompt_length = np.repeat([len(p) for p in prompts], n)
        self.length, self.segment = self.prompt_length.copy(), self.prompt_length.copy()   # segment: see generate, text
        self.sampled, self.injected = np.zeros(b, dtype=np.int64), np.zeros(b, dtype=np.int64)
        self.finish = np.zeros(b, dtype=np.int8)   # GOING
        self.ids, self.mask = np.zeros((b, most), dtype=np.int64), np.zeros((b, most), dtype=bool)
        self.logp, self.entropy = np.zeros((b, most), dtype=np.float32), None   # indexed by the token that is scored
        if entropy:
            self.entropy = np.zeros((b, most), dtype=np.float32)
        for i, prompt in enumerate(prompts):
            self.ids[i * n:(i + 1) * n, :len(prompt)] = prompt

    def room(self, rows, max_new, most):
        """Tokens that each row may still sample; 0 for the row -1 of an idle slot."""
        return np.where(rows >= 0, np.minimum(max_new[rows] - self.sampled[rows], most - self.length[rows]), 0)

    def state(self, rows):
        """(3, R) int64 for the device: last token, its position, row key; zeros for an idle slot."""
        last = self.length[rows] - 1
        return np.where(rows >= 0, np.stack((self.ids[rows, last], last, self.keys[rows])), 0)

    def append(self, rows, tokens, logps, entropies, take, eos):
        """The first take[i] tokens of column i go to rows[i], but none after an eos -> how many each row took."""
        is_eos = np.isin(tokens, eos) & (np.arange(len(tokens))[:, None] < take)
        ended = is_eos.any(axis=0)
        take = np.where(ended, is_eos.argmax(axis=0) + 1, take)
        j, i = np.nonzero(np.arange(len(tokens))[:, None] < take)
        at = rows[i], self.length[rows[i]] + j
        self.ids[at], self.logp[at], self.mask[at] = tokens[j, i], logps[j, i], True
        if self.entropy is not None:
            self.entropy[at] = entropies[j, i]
        real = rows >= 0
        self.length[rows[real]] += take[real]
        self.sampled[rows[real]] += take[real]
        self.finish[rows[ended]] = EOS
        return take

    def cut(self, row, length):
        """Takes back what row sampled from index `length` on."""
        self.sampled[row] -= self.length[row] - length
        for x in (self.ids, self.mask, self.logp, self.entropy):
            if x is not None:
                x[row, length:] = 0
        self.length[row], self.finish[row] = length, GOING

    def inject(self, row, ids):
        """Tokens that the policy did not sample: they are seen (attention), not trained on (mask, log-prob 0)."""
        start = self.length[row]
        self.ids[row, start:start + len(ids)] = ids
        self.injected[row] += len(ids)
        self.length[row] = self.segment[row] = start + len(ids)

    def result(self, stats, engine):
        t = int(self.length.max())
        if not np.isfinite(self.logp).all():
            engine.kv = None   # its NaN would outlive better weights
            raise RunError("the model's logits are not finite: its weights hold NaN or inf, or it overflows in "
                           f"{str(engine.dtype).removeprefix('torch.')}")
        tokens = int(self.sampled.sum())
        stats = {"tokens_sampled": tokens, "prompt_tokens": int(self.prompt_length.sum()),
                 "injected_tokens": int(self.injected.sum()), **stats, "tokens_per_s": tokens / stats["wall_s"],
                 "path": "fused kernels" if engine.fused else "flash" if engine.flash else "plain"}
        tensor = torch.from_numpy
        return Rollout(ids=tensor(self.ids[:, :t].copy()), mask=tensor(self.mask[:, :t].copy()),
                       length=tensor(self.length), prompt_length=tensor(self.prompt_length),
                       logp=tensor(self.logp[:, 1:t].copy()),
                       entropy=None if self.entropy is None else tensor(self.entropy[:, 1:t].copy()),
                       finish=[FINISH[f] for f in self.finish], stats=stats)
