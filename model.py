"""
The transformer: one decoder-only network for the Llama, SmolLM2, Qwen2.5 and Qwen3 shapes.

    h = embed(ids)
    for each layer:  h = h + attention(rmsnorm(h));  h = h + swiglu(rmsnorm(h))
    logits = head(rmsnorm(h))

Every module is named as in the Hugging Face checkpoint, so that loading and saving need no map of names. The forward
pass takes packed sequences (one after the other, no padding) and returns hidden states; the head is applied by
common.py, in chunks. The residual stream is fp32 and every product runs in `compute_dtype`: with bf16 that is what
autocast does, written out, and engine.py repeats the same steps, so that sampler and trainer see the same numbers.
On CUDA in bf16 both run through the kernels of fused.py, which round less often and leave the network as it is here;
with an adapter the sampler alone does, since it has the adapter merged.

An adapter (LoRA, arXiv 2106.09685) is two small matrices beside a frozen one, y = W x + alpha / r B A x; adapters are
read and written as the package peft does.

Left out on purpose: dropout, sliding windows, rope scaling, mixtures of experts. A config that asks for one is refused.
"""
import copy
import functools
import json
import math
import os
import pickle
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import ROOT, RunError, UserError, sha256_model

# ----------------------------------------------------------------------------------------------------------------------
# The shape: what config.json says, checked

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class Config:
    """The shape of the network. `raw` is config.json as it was read; it is written back when the model is saved."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    raw: dict = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_dict(cls, raw, where="config.json"):
        """config.json as a dict -> Config. A feature that this file does not have is refused by name (UserError)."""
        try:
            return cls.read(raw, where)
        except (TypeError, ValueError, AttributeError) as e:
            raise UserError(f"{where}: a value of the wrong kind ({e})") from e

    @classmethod
    def read(cls, raw, where):
        archs = raw.get("architectures") or []
        if not archs:
            raise UserError(f"{where}: no `architectures`; expected one of {', '.join(ARCHITECTURES)}")
        if archs[0] not in ARCHITECTURES:
            raise UserError(f"{where}: architecture {archs[0]} is not supported; expected one of "
                            f"{', '.join(ARCHITECTURES)}")
        kind = ARCHITECTURES[archs[0]]
        # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling, which wins over it there
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        refused = {
            "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default"
            or any(isinstance(v, dict) for v in rope.values()),   # one set of angles a layer type
            "partial rotary": float(raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1) != 1,
            "sliding window": bool(raw.get("use_sliding_window"))
            or any(t != "full_attention" for t in raw.get("layer_types") or [])
            or (kind == "llama" and bool(raw.get("sliding_window"))),
            "mlp_bias": bool(raw.get("mlp_bias")),
            "attention dropout": bool(raw.get("attention_dropout")),
            f"hidden_act {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
            "mixture of experts": any(raw.get(k) for k in ("num_experts", "num_local_experts", "n_routed_experts")),
            "quantization": bool(raw.get("quantization_config")),
        }
        for name, asked in refused.items():
            if asked:
                raise UserError(f"{where}: {archs[0]} with {name} is not supported")
        sizes = {k: raw.get(k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                         "num_attention_heads")}
        optional = {k: raw[k] for k in ("num_key_value_heads", "head_dim", "max_position_embeddings")
                    if raw.get(k) is not None}
        for name, value in {**sizes, **optional}.items():
            if type(value) is not int or value < 1:
                raise UserError(f"{where}: {name} is {'missing' if value is None else repr(value)}, expected a whole "
                                f"number above 0")
        heads = sizes["num_attention_heads"]
        config = cls(   # what a file leaves out has the value that transformers gives it
            model_type=kind, **sizes, num_key_value_heads=optional.get("num_key_value_heads", heads),
            head_dim=optional.get("head_dim", 128 if kind == "qwen3" else sizes["hidden_size"] // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            max_position_embeddings=optional.get("max_position_embeddings", 2048 if kind == "llama" else 32768),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias", False)),
            o_bias=kind != "qwen2" and bool(raw.get("attention_bias", False)),
            qk_norm=kind == "qwen3", raw=dict(raw))
        if config.num_attention_heads % config.num_key_value_heads:
            raise UserError(f"{where}: {config.num_attention_heads} query heads are no multiple of "
                            f"{config.num_key_value_heads} key/value heads")
        for name, right in [("rms_norm_eps", 0 <= config.rms_norm_eps < 1), ("rope_theta", config.rope_theta > 0),
                            ("head_dim", config.head_dim > 0 and config.head_dim % 2 == 0)]:   # it is rotated in halves
            if not right:
                raise UserError(f"{where}: {name} {getattr(config, name)} cannot be")
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
            if not isinstance(raw.get(name, False), (bool, type(None))):   # bool("false") is True
                raise UserError(f"{where}: {name} is {raw[name]!r}, expected true or false")
        return config


def llama_config(vocab_size, hidden_size, layers, heads, kv_heads, intermediate_size, context=1024, theta=10000.0,
                 eos=None, pad=None):
    """The config of a new Llama-shaped model with a tied head, as the dict that config.json will hold."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
            "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden_size // heads,
            "hidden_act": "silu", "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": theta,
            "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02,
            "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}


# ----------------------------------------------------------------------------------------------------------------------
# The parts

def wide(x):
    """x in fp32, or in fp64 where a test wants all digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight, eps, dtype):
    """x (..., C) -> x / rms(x) * weight, summed in fp32 and returned in `dtype`."""
    return F.rms_norm(wide(x), (x.shape[-1],), weight.to(torch.promote_types(x.dtype, torch.float32)), eps).to(dtype)


def rope_angles(positions, head_dim, theta):
    """positions (T,) -> cos and sin (T, head_dim / 2), fp32. Rotary embedding: arXiv 2104.09864, equation 34."""
    # 1 / theta^x, not theta^-x: the last bits are then those of transformers, and a deep model shows them
    freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions.float()[:, None] * freq
    return angle.cos(), angle.sin()


def apply_rope(x, cos, sin):
    """x (T, H, D) rotated in the half-split layout of the Hugging Face checkpoints (pairs are i and i + D/2)."""
    x1, x2 = wide(x).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:   # a torch without it: the loop below serves every device
    varlen_attn = None
# torch 2.11 takes grouped heads by their count alone; 2.12 and later want to be asked
VARLEN_GQA = {"enable_gqa": True} if varlen_attn and "enable_gqa" in varlen_attn.__code__.co_varnames else {}


def packed_attention(q, k, v, lengths, cu):
    """
    Causal attention inside each packed sequence. q (T, Hq, D), k and v (T, Hkv, D) -> (T, Hq, D).
    lengths: the sequences' lengths, Python ints that sum to T; cu (S + 1,) int32, their running sum on the device.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None:
        longest = max(lengths)
        return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0), **VARLEN_GQA)
    # One small causal product a sequence. On CPU a block-diagonal mask over the pack is 15 times slower.
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = [F.scaled_dot_product_attention(a.transpose(0, 1)[None], b.transpose(0, 1)[None], c.transpose(0, 1)[None],
                                          is_causal=True)[0].transpose(0, 1)
           for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths))]
    return torch.cat(out)


@functools.cache
def load_kernels():
    """fused.py where Triton is installed (it comes with torch for CUDA), else None."""
    try:
        import fused
    except ImportError as e:
        if not (e.name or "").startswith("triton"):
            raise
        return None
    return fused


def head_factors(weight):
    """The dtype of the head's product beside the kernels of fused.py: fp16, with three bits more than bf16; but bf16
    where the weights are, since trainer and engine then read them without a copy."""
    return torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16


class Linear(nn.Linear):
    """
    A linear layer that multiplies in the dtype of its input; the master weight keeps its own. With an adapter, lora_A
    (r, in) and lora_B (out, r) in fp32: y = W x + lora_scale B A x (arXiv 2106.09685, equation 3); engine.py merges it.
    """

    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.lora_scale = 0.0

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)
        if self.lora_A is None:
            return y
        return y + F.linear(F.linear(x, self.lora_A.to(x.dtype)) * self.lora_scale, self.lora_B.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim), RMSNorm(c.head_dim)
        self.c = c

    def forward(self, x, cos, sin, lengths, cu):
        c = self.c
        q = self.q_proj(x).view(-1, c.num_attention_heads, c.head_dim)       # (T, Hq, D)
        k = self.k_proj(x).view(-1, c.num_key_value_heads, c.head_dim)       # (T, Hkv, D)
        v = self.v_proj(x).view(-1, c.num_key_value_heads, c.head_dim)
        if c.qk_norm:   # Qwen3 normalises each head before the rotation
            q = rms_norm(q, self.q_norm.weight, c.rms_norm_eps, q.dtype)
            k = rms_norm(k, self.k_norm.weight, c.rms_norm_eps, k.dtype)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return self.o_proj(packed_attention(q, k, v, lengths, cu).flatten(1))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, c):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size)
        self.eps = c.rms_norm_eps

    def forward(self, h, cos, sin, lengths, cu, dtype):
        h = h + self.self_attn(rms_norm(h, self.input_layernorm.weight, self.eps, dtype), cos, sin, lengths, cu)
        return h + self.mlp(rms_norm(h, self.post_attention_layernorm.weight, self.eps, dtype))

    def fused(self, kernels, h, y, cos, sin, cu, longest, add=False):
        """The same through fused.py. y is what the block before adds to h; returned are h and what this layer's last
        block adds, or with `add` their sum and None."""
        h, x = kernels.add_norm(h, y, self.input_layernorm.weight, self.eps)
        y = kernels.attention(x, self.self_attn, cos, sin, cu, longest)
        h, x = kernels.add_norm(h, y, self.post_attention_layernorm.weight, self.eps)
        y = kernels.mlp(x, self.mlp)
        return (h + y, None) if add else (h, y)


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size)


class Transformer(nn.Module):
    """
    model(ids, lengths) -> hidden states (T, C) after the last norm, in `compute_dtype` (fp32 from the fused kernels).

    ids (T,) int64: sequences one after the other; lengths: their lengths, Python ints that sum to T. The logits are
    `common.output_logits(hidden, model.head_weight)`.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.compute_dtype = torch.float32
        self.checkpointing = False   # recompute each layer in the backward pass: less memory, a third more arithmetic
        self.eos_ids = ()            # every id that ends a completion; filled by load_model
        self.adapter = None          # an Adapter where only its matrices are trained, see place_adapter

    @property
    def head_weight(self):
        """The output matrix (V, C): the embedding itself when the head is tied. Its `factors` is the dtype in which
        common.output_logits multiplies; None means that of the hidden states."""
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        weight.factors = head_factors(weight) if self.kernels() else None
        return weight

    @property
    def device(self):
        return self.model.embed_tokens.weight.device

    def kernels(self):
        """fused.py where this model trains through it: on CUDA in bf16, with Triton, without an adapter. Else None."""
        d = self.config.head_dim   # flash attention wants a multiple of 8, at most 256, and an Ampere or later
        if (self.device.type != "cuda" or self.compute_dtype != torch.bfloat16 or d % 8 or d > 256
                or torch.cuda.get_device_capability(self.device) < (8, 0) or self.adapter is not None):
            return None
        return load_kernels()

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def num_trained(self):
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def describe(self):
        """The sizes, for the line that a run prints."""
        text = f"{self.num_params() / 1e6:.2f}M parameters"
        return text if self.adapter is None else (
            f"{text}, {self.num_trained() / 1e6:.3f}M of them trained (LoRA rank {self.adapter.rank}, alpha "
            f"{self.adapter.alpha:g})")

    def settings(self):
        """What a record keeps of what is trained."""
        a = self.adapter
        return {"trained_parameters": self.num_trained()} | ({} if a is None else {
            "lora_rank": a.rank, "lora_alpha": a.alpha, "lora_targets": a.targets})

    def forward(self, ids, lengths):
        if ids.ndim != 1 or sum(lengths) != ids.numel():
            raise ValueError(f"ids must be packed (T,) with lengths that sum to T; got {tuple(ids.shape)}, "
                             f"lengths sum to {sum(lengths)}")
        sizes = torch.tensor(lengths, device=ids.device)
        ends = sizes.cumsum(0)
        cu = F.pad(ends, (1, 0)).int()
        positions = torch.arange(ids.numel(), device=ids.device) - torch.repeat_interleave(
            ends - sizes, sizes, output_size=ids.numel())
        cos, sin = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        h = wide(self.model.embed_tokens(ids))   # (T, C)
        again = self.checkpointing and torch.is_grad_enabled()
        if kernels := self.kernels():
            y = None
            for layer in self.model.layers:
                args = (kernels, h, y, cos, sin, cu, max(lengths))
                h, y = (torch.utils.checkpoint.checkpoint(layer.fused, *args, add=True, use_reentrant=False)
                        if again else layer.fused(*args))
            return kernels.add_norm(h, y, self.model.norm.weight, self.config.rms_norm_eps, torch.float32)[1]
        for layer in self.model.layers:
            args = (h, cos, sin, lengths, cu, self.compute_dtype)
            h = torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False) if again else layer(*args)
        return rms_norm(h, self.model.norm.weight, self.config.rms_norm_eps, self.compute_dtype)


def init_weights(model, seed):
    """N(0, 0.02), and 0.02 / sqrt(2 layers) for the two projections that write into the residual stream (GPT-2)."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue   # norms stay at 1, biases at 0
        std = 0.02 / math.sqrt(2 * model.config.num_hidden_layers) if name.endswith(
            ("o_proj.weight", "down_proj.weight")) else 0.02
        with torch.no_grad():
            p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=gen))
    for name, p in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(p)


# ----------------------------------------------------------------------------------------------------------------------
# Loading and saving

def find_folder(name):
    """A folder in Hugging Face format, or a hub id that is downloaded (once) -> Path of the folder."""
    name, path = str(name), Path(name)
    for folder in (path, ROOT / name):   # the second: data/tiny from any working directory
        if folder.is_dir():
            if (folder / "checkpoint").is_dir() and not (folder / "model.safetensors").exists():   # a run folder
                adapted = folder / "checkpoint" / "adapter_config.json"
                base = read_json(adapted).get("base_model_name_or_path") if adapted.exists() else None
                raise UserError(f"--model {name}: a run folder; give " + (
                    f"--model {base} --adapter {name}" if base else f"--model {name.rstrip('/')}/checkpoint"))
            if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
                base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
                raise UserError(f"--model {name}: holds an adapter and no model; give --model {base} --adapter {name}")
            return folder
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"--model {name}: no such folder (expected a folder with config.json and model.safetensors, "
                        f"or a hub id like org/name)")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as e:   # the hub client has a dozen error classes; each of them means the same to the user
        raise UserError(f"--model {name}: neither a local folder nor a model that the hub gives "
                        f"({type(e).__name__}: {str(e).splitlines()[0]})") from e


def read_json(path):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UserError(f"{path.parent}: no {path.name} (is this a model folder in Hugging Face format?)") from e
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON ({e})") from e
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object")
    return found


def read_tensors(folder, name="model"):
    """All tensors of model.safetensors, or of the shards that model.safetensors.index.json lists -> {name: tensor}."""
    index = folder / f"{name}.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(f, str) for f in shards.values()):
            raise UserError(f"{index}: no `weight_map` that says which file holds which tensor")
        files = sorted(set(shards.values()))
    else:
        files = [f"{name}.safetensors"]
    tensors = {}
    for file in files:
        if not (folder / file).exists():
            raise UserError(f"{folder}: {file} is missing")
        try:
            with safe_open(folder / file, framework="pt") as f:
                tensors.update({k: f.get_tensor(k) for k in f.keys()})
        except (SafetensorError, OSError) as e:
            raise UserError(f"{folder / file}: cannot be read ({e})") from e
    return tensors


def check_tensors(folder, want, got, asks="config.json asks"):
    """want: {name: shape}, got: {name: tensor}. UserError for what is missing, extra or misshapen, by name."""
    for problem, names in (("missing", want.keys() - got.keys()), ("unexpected", got.keys() - want.keys())):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{folder}: {problem} tensor {', '.join(sorted(names)[:3])}{more}")
    for key, tensor in got.items():
        if tensor.shape != want[key]:
            raise UserError(f"{folder}: {key} has shape {list(tensor.shape)}, {asks} for {list(want[key])}")


def load_model(name, dtype=torch.float32, device="cpu", compute_dtype=None):
    """
    A folder or hub id -> Transformer with weights of `dtype` on `device`. Every tensor of the checkpoint must have a
    place of its shape and every place a tensor: what is missing, extra or misshapen is named in a UserError.
    """
    folder = find_folder(str(name))
    config = Config.from_dict(read_json(folder / "config.json"), where=f"{folder}/config.json")
    with torch.device("meta"):
        model = Transformer(config)
    want, got = model.state_dict(), read_tensors(folder)
    got = {k: v for k, v in got.items() if not k.endswith("rotary_emb.inv_freq")}   # derived; old files carry it
    if config.tie_word_embeddings and "lm_head.weight" in got:
        # some checkpoints repeat the tied head; two copies that differ would be two models
        if not torch.equal(got.pop("lm_head.weight"), got.get("model.embed_tokens.weight", torch.empty(0))):
            raise UserError(f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding")
    check_tensors(folder, {k: v.shape for k, v in want.items()}, got)
    model.load_state_dict({k: v.to(device=device, dtype=dtype) for k, v in got.items()}, assign=True)
    model.compute_dtype = compute_dtype or dtype
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = config.raw.get("eos_token_id") if eos is None else eos
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) and 0 <= i < config.vocab_size for i in ids):
        raise UserError(f"{folder}: eos_token_id {eos} must be ids below the vocabulary's {config.vocab_size}")
    model.eos_ids = tuple(ids)
    return model


def new_model(raw_config, seed, device="cpu"):
    """A model of random weights from a config dict (see llama_config)."""
    config = Config.from_dict(raw_config)
    model = Transformer(config)
    init_weights(model, seed)
    eos = raw_config.get("eos_token_id")
    model.eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return model.to(device)


def save_model(model, folder, tokenizer=None, dtype=None):
    """
    Writes config.json, model.safetensors, generation_config.json and the tokenizer into `folder`, so that
    transformers loads it unchanged. Written beside and renamed: a new folder appears whole or not at all.
    """
    folder = Path(folder)
    tmp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    dtype = dtype or next(model.parameters()).dtype
    # clone: engine.py keeps some weights as views of one fused tensor, which a checkpoint must not share
    state = {k: v.detach().to(device="cpu", dtype=dtype).clone().contiguous() for k, v in model.state_dict().items()}
    save_file(state, tmp / "model.safetensors", metadata={"format": "pt"})
    raw = {k: v for k, v in model.config.raw.items() if k not in ("torch_dtype", "transformers_version")}
    raw["dtype"] = str(dtype).removeprefix("torch.")
    (tmp / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"eos_token_id": list(model.eos_ids) if len(model.eos_ids) != 1 else model.eos_ids[0],
                  "bos_token_id": raw.get("bos_token_id"), "pad_token_id": raw.get("pad_token_id")}
    (tmp / "generation_config.json").write_text(
        json.dumps({k: v for k, v in generation.items() if v not in (None, [])}, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(tmp)
    put_in_place(tmp, folder)


def put_in_place(tmp, folder):
    """A folder that was written beside -> `folder`, or its files into the one that is there."""
    for file in tmp.iterdir():   # the rename below must not become durable before the bytes are
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    if not folder.exists():
        os.replace(tmp, folder)
        return
    for file in tmp.iterdir():   # what else lies in an existing folder stays, shards of older weights apart
        os.replace(file, folder / file.name)
    for file in [*folder.glob("model.safetensors.index.json"), *folder.glob("model-?????-of-?????.safetensors")]:
        file.unlink()
    tmp.rmdir()


# ----------------------------------------------------------------------------------------------------------------------
# Adapters, in the files of peft

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")   # every layer but the head


@dataclass
class Adapter:
    """What adapter_config.json says of an adapter that a model has."""
    rank: int
    alpha: float
    targets: list | str        # ends of the layers' names, or a pattern for whole names
    rslora: bool = False       # scale alpha / sqrt(r) (arXiv 2312.03732) in place of alpha / r
    base: str | None = None    # name of the frozen model
    base_sha256: str = ""      # of its weight files; kept in base.json, since peft warns of keys that it does not know

    @property
    def scale(self):
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapted_layers(model, targets, where):
    """The linear layers that `targets` means to peft -> {name: Linear}. What is no such layer is named (UserError)."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear) and n.startswith("model.")}
    if targets == "all-linear":
        return layers
    if isinstance(targets, str):
        try:
            found = {n: m for n, m in layers.items() if re.fullmatch(targets, n)}
        except re.error as e:
            raise UserError(f"{where} {targets}: not a pattern ({e})") from e
        unknown = [] if found else [targets]
    else:
        found = {n: m for n, m in layers.items() if any(f".{n}".endswith(f".{t}") for t in targets)}
        unknown = [t for t in targets if not any(f".{n}".endswith(f".{t}") for n in layers)]
    if unknown:   # peft would pass over it, and train less than what was asked for
        raise UserError(f"{where} {' '.join(unknown)}: not a layer that can be adapted; there is {' '.join(TARGETS)}")
    return found


def place_adapter(model, adapter, tensors, where):
    """
    Gives the layers of adapter.targets their matrices, tensors {"NAME.lora_A": (r, in), "NAME.lora_B": (out, r)}, and
    freezes all else. What is frozen needs no fp32 master: the matrices are kept in compute_dtype, in which the products
    read them anyway, so no number changes. Embedding, norms and biases stay as they are.
    """
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight.data = module.weight.data.to(model.compute_dtype)
    for name, layer in adapted_layers(model, adapter.targets, where).items():
        for part in ("lora_A", "lora_B"):
            value = tensors[f"{name}.{part}"].to(device=model.device, dtype=torch.float32, copy=True)
            setattr(layer, part, nn.Parameter(value.contiguous()))
        layer.lora_scale = adapter.scale
    model.adapter = adapter


def add_lora(model, rank, alpha=None, targets=None, seed=0, base=None, base_sha256=""):
    """
    A new adapter on a model: A uniform in +-1 / sqrt(in) (kaiming_uniform with a = sqrt(5), as in peft), B zero, so
    that the start is the base exactly. alpha: default 2 rank. targets: default all of TARGETS. UserError for others.
    """
    adapter = Adapter(rank, 2 * rank if alpha is None else alpha, list(targets or TARGETS), False, base, base_sha256)
    gen, tensors = torch.Generator().manual_seed(seed), {}
    layers = adapted_layers(model, adapter.targets, "--lora-targets")
    widest = max(max(x.in_features, x.out_features) for x in layers.values())
    if rank > widest:
        raise UserError(f"--lora-rank {rank}: no adapted layer has more than {widest} rows or columns; try 8 to 64")
    for name, layer in layers.items():
        tensors[f"{name}.lora_A"] = nn.init.kaiming_uniform_(torch.empty(rank, layer.in_features), a=math.sqrt(5),
                                                             generator=gen)
        tensors[f"{name}.lora_B"] = torch.zeros(layer.out_features, rank)
    place_adapter(model, adapter, tensors, "--lora-targets")


def find_adapter(name):
    """A run folder or an adapter folder -> Path of the folder with adapter_config.json."""
    for path in (Path(name), ROOT / name):
        for folder in (path, path / "checkpoint"):
            if (folder / "adapter_config.json").exists():
                return folder.resolve()   # not the link, which a run that goes on would move
            if (folder / "model.safetensors").exists():
                raise UserError(f"--adapter {name}: holds a whole model and no adapter; give it as --model "
                                f"{name.rstrip('/')}{'/checkpoint' if folder != path else ''}")
    raise UserError(f"--adapter {name}: no adapter there (expected a run folder, or a folder with adapter_config.json "
                    f"and adapter_model.safetensors)")


# fields of adapter_config.json that are read, and those that say nothing about the numbers of a trained adapter. Where
# another field is set, the adapter is one that is not computed here (DoRA, biases, ranks that differ by layer ...)
READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "init_lora_weights",
        "base_model_name_or_path")
NO_MATTER = ("auto_mapping", "revision", "task_type", "inference_mode", "lora_dropout", "peft_version", "eva_config",
             "megatron_config", "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying")


def read_adapter_config(folder):
    """adapter_config.json -> Adapter. A kind of adapter that this file does not compute is refused by name."""
    where = f"{folder}/adapter_config.json"
    raw = read_json(folder / "adapter_config.json")
    refused = {f"peft_type {raw.get('peft_type')}": raw.get("peft_type") != "LORA",
               f"bias {raw.get('bias')!r}": raw.get("bias", "none") != "none",
               # these start from other base weights than the ones in the base's files
               f"init_lora_weights {raw.get('init_lora_weights')!r}": raw.get("init_lora_weights", True) not in (
                   True, False, None, "gaussian", "eva", "orthogonal"),
               **{f"{k} {json.dumps(v)[:40]}": bool(v) for k, v in raw.items() if k not in READ + NO_MATTER}}
    for name, asked in refused.items():
        if asked:
            raise UserError(f"{where}: {name} is not supported (plain LoRA on linear layers is)")
    rank, alpha, targets, rslora = (raw.get(k) for k in ("r", "lora_alpha", "target_modules", "use_rslora"))
    for name, value, right, want in [
            ("r", rank, type(rank) is int and rank > 0, "a whole number above 0"),
            ("lora_alpha", alpha, type(alpha) in (int, float) and 0 < alpha < 1e38, "a number above 0 and below 1e38"),
            ("use_rslora", rslora, rslora is None or type(rslora) is bool, "true or false"),
            ("target_modules", targets, isinstance(targets, (str, list)) and targets
             and all(isinstance(t, str) for t in targets), "names of layers")]:
        if not right:
            raise UserError(f"{where}: {name} is {value!r}, expected {want}")
    return Adapter(rank, alpha, targets, bool(rslora), raw.get("base_model_name_or_path"))


def load_adapter(model, folder, base=None, base_sha256=""):
    """
    The adapter in `folder`, ours or one of peft, onto a model. base, base_sha256: what the model is; an adapter of ours
    names the hash of its base, and another one is a UserError, like tensors that do not fit. Where only the names
    differ, as those of a hub id and its copy do, that is printed.
    """
    folder = Path(folder)
    adapter, got = read_adapter_config(folder), read_tensors(folder, "adapter_model")
    layers = adapted_layers(model, adapter.targets, f"{folder}: target_modules")
    want = {}
    for name, layer in layers.items():
        want[lora_key(f"{name}.lora_A")] = torch.Size((adapter.rank, layer.in_features))
        want[lora_key(f"{name}.lora_B")] = torch.Size((layer.out_features, adapter.rank))
    if (folder / "base.json").exists():
        adapter.base_sha256 = str(read_json(folder / "base.json").get("sha256") or "")
    if base_sha256 and adapter.base_sha256 and base_sha256 != adapter.base_sha256:
        raise UserError(f"{folder}: trained on {adapter.base} (hash {adapter.base_sha256[:12]}), --model {base} has "
                        f"hash {base_sha256[:12]}: another base")
    check_tensors(folder, want, got, "adapter_config.json and the base ask")
    for key, tensor in got.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            what = "NaN or inf" if tensor.is_floating_point() else str(tensor.dtype)
            raise UserError(f"{folder}: {key} holds {what}; take an adapter of finite floating-point numbers")
    if base and not adapter.base_sha256 and adapter.base != base:
        print(f"{folder}: its base is {adapter.base}, --model is {base}: other names, but its shapes fit")
    place_adapter(model, adapter, {unkey(k): v for k, v in got.items()}, f"{folder}: target_modules")
    if base:
        adapter.base, adapter.base_sha256 = base, base_sha256


def lora_key(name):
    """The name of a parameter in adapter_model.safetensors."""
    return f"base_model.model.{name}.weight"


def unkey(key):
    return key.removeprefix("base_model.model.").removesuffix(".weight")


def set_up_lora(model, folder, args):
    """
    What the flags of a script ask for: --adapter goes on with an adapter (and with its rank; flags that contradict it
    are refused), --lora-rank starts a new one, else all weights are trained. folder: of --model.
    -> the folder of --adapter, or None.
    """
    rank, alpha, targets = (getattr(args, f"lora_{x}", None) for x in ("rank", "alpha", "targets"))
    if args.adapter:
        path = find_adapter(args.adapter)
        load_adapter(model, path, args.model, sha256_model(folder))
        a = model.adapter
        own = sorted(a.targets) if isinstance(a.targets, list) else a.targets
        for flag, asked, has in [("rank", rank, a.rank), ("alpha", alpha, a.alpha),
                                 ("targets", targets and sorted(targets), own)]:
            if asked is not None and asked != has:
                raise UserError(f"--lora-{flag} {asked}: --adapter {args.adapter} has {has} and goes on with it; leave "
                                f"--lora-{flag} out")
        return path
    if rank:
        add_lora(model, rank, alpha, targets, args.seed, args.model, sha256_model(folder))
    return None


def save_adapter(model, folder):
    """
    Writes adapter_config.json and adapter_model.safetensors into `folder` as peft does, and base.json with the hash of
    the base; whole or not at all, and the same bytes for the same adapter.
    """
    folder, a = Path(folder), model.adapter
    tmp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    state = {lora_key(n): p.detach().cpu().contiguous() for n, p in model.named_parameters() if "lora_" in n}
    save_file(state, tmp / "adapter_model.safetensors", metadata={"format": "pt"})   # two keys would have any order
    (tmp / "base.json").write_text(json.dumps({"name": a.base, "sha256": a.base_sha256}) + "\n")
    alpha = int(a.alpha) if a.alpha == int(a.alpha) else a.alpha
    (tmp / "adapter_config.json").write_text(json.dumps({
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": a.base, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_pattern": None,
        "layers_to_transform": None, "lora_alpha": alpha, "lora_dropout": 0.0, "modules_to_save": None,
        "peft_type": "LORA", "r": a.rank, "rank_pattern": {}, "revision": None, "target_modules": a.targets,
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": a.rslora}, indent=2) + "\n")
    put_in_place(tmp, folder)


def frozen_copy(model):
    """The model as it is now, an adapter with it. What is frozen already is shared, not copied."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad}).requires_grad_(False)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints

def save_weights(model, folder, tokenizer):
    """The model in Hugging Face format, or its adapter in that of peft; RunError for weights that an update broke."""
    for name, p in model.named_parameters():
        # the norm: its square overflows from 1e19 on, where no product of the model is a number any more
        if p.requires_grad and not torch.isfinite(torch.linalg.vector_norm(p.detach(), dtype=torch.float32)):
            raise RunError(f"{name} is not finite after the last update, or beyond what fp32 can square; these weights "
                           f"are not saved (a smaller --lr?)")
    if model.adapter is None:
        save_model(model, folder, tokenizer)
    else:
        save_adapter(model, folder)


def save_checkpoint(folder, model, tokenizer, optimizer, state):
    """The weights, and resume.pt with the optimizer and `state` (a dict of plain values)."""
    save_weights(model, folder, tokenizer)
    tmp = Path(folder) / "resume.pt.tmp"
    with open(tmp, "wb") as f:   # not a path: a full disk then says so in an OSError
        torch.save({"optimizer": optimizer.state_dict(), **state}, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, Path(folder) / "resume.pt")


def load_checkpoint(folder, model, optimizer):
    """Weights and optimizer back, on whatever device the model is now -> the saved state."""
    folder = Path(folder)
    if not (folder / "resume.pt").exists():
        raise UserError(f"--resume: {folder} holds no resume.pt (the run was stopped before its first checkpoint)")
    try:
        saved = torch.load(folder / "resume.pt", map_location="cpu", weights_only=True)
        weights = read_tensors(folder, "model" if model.adapter is None else "adapter_model")
        with torch.no_grad():
            for name, p in model.named_parameters():
                if model.adapter is None or p.requires_grad:
                    p.copy_(weights[name if model.adapter is None else lora_key(name)])
        optimizer.load_state_dict(saved.pop("optimizer"))
        saved["step"]   # what every script goes on from
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as e:
        # of the last, torch's text is advice to load what is not trusted
        reason = "" if isinstance(e, pickle.UnpicklingError) else f": {' '.join(str(e).split())[:200]}"
        raise UserError(f"--resume: {folder} is not whole ({type(e).__name__}{reason})") from e
    return saved
