"""
model.py against transformers, the independent reference, for random configs of every shape that it knows; what it
writes, and what it refuses. The head is a plain product here; its chunked form is tested in test_common.py.
"""
import json

import pytest
import torch
from helpers import EOS, KINDS, tiny_config, tiny_folder, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import model as model_module
from common import UserError, make_optimizer
from model import Config, RMSNorm, load_checkpoint, load_model, new_model, rms_norm, save_checkpoint, save_model

torch.set_num_threads(1)
THEIRS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
          "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def theirs(kind, seed=0, **more):
    """A random transformers model with weights, norms and biases large enough that each of them shows in the logits."""
    config_class, model_class = THEIRS[kind]
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2,
             "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(seed)
    hf = model_class(config_class(**{**shape, "attn_implementation": "eager", **more})).eval()
    with torch.no_grad():
        for name, p in hf.named_parameters():
            p.copy_(torch.randn(p.shape) * (0.3 if "norm" in name or name.endswith("bias") else 0.15)
                    + (1 if "norm" in name else 0))
    return hf


def logits(model, ids, lengths=None):
    """Packed ids (T,) -> (T, V)."""
    return model(ids, lengths or [len(ids)]).float() @ model.head_weight.float().t()


def ids_of(length, vocab=97, seed=3):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------------------
# Parity with transformers

CASES = [(kind, heads, kv, tied, {}) for kind in KINDS for heads, kv in ((4, 4), (6, 2), (6, 1), (7, 1))
         for tied in (True, False)] + [
    ("llama", 6, 2, False, {"head_dim": 10}),                    # 6 x 10 is not the hidden size
    ("llama", 7, 1, True, {"head_dim": 16}),
    ("llama", 6, 2, True, {"attention_bias": True}),             # a bias in o_proj too
    ("llama", 4, 2, True, {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("qwen2", 6, 2, True, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3", 6, 2, True, {"head_dim": 32}),
    ("qwen3", 6, 3, False, {"head_dim": 6, "attention_bias": True}),
]


@pytest.mark.parametrize("kind, heads, kv, tied, more", CASES)
def test_logits_equal_those_of_transformers(tmp_path, kind, heads, kv, tied, more):
    hidden = {4: 48, 6: 48, 7: 56}[heads]
    hf = theirs(kind, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied,
                **more)
    hf.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert ours.num_params() == sum(p.numel() for p in hf.parameters())
    ids = ids_of(40)
    with torch.no_grad():
        want = hf(ids[None]).logits[0]
        assert want.std() > 0.5   # else nothing would be shown
        assert (logits(ours, ids) - want).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_each_row_alone(tmp_path, kind):
    """Ragged rows in one pack, in any order, equal each row alone and padded rows of transformers (X17)."""
    hf = theirs(kind)
    hf.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    rows = [ids_of(n, seed=n) for n in (5, 1, 17, 2, 9)]
    with torch.no_grad():
        alone = [logits(ours, row) for row in rows]
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            packed = logits(ours, torch.cat([rows[i] for i in order]), [len(rows[i]) for i in order])
            for i, got in zip(order, packed.split([len(rows[i]) for i in order])):
                assert torch.allclose(got, alone[i], atol=1e-5)
        width = max(map(len, rows))
        for side in ("left", "right"):
            ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
            for i, row in enumerate(rows):
                at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
                ids[i, at], mask[i, at] = row, 1
            position = (mask.cumsum(1) - 1).clamp(min=0).long()
            want = hf(ids, attention_mask=mask, position_ids=position).logits
            for i in range(len(rows)):
                assert (want[i][mask[i] > 0] - alone[i]).abs().max() < 1e-4


def test_no_row_of_a_pack_sees_another():
    model = tiny_model(scale=4.0)
    a, b, c = ids_of(6, 200, 1), ids_of(9, 200, 2), ids_of(9, 200, 4)
    with torch.no_grad():
        one, two = (model(torch.cat((a, x, a)), [6, 9, 6]) for x in (b, c))
    assert torch.equal(one[:6], two[:6]) and torch.equal(one[15:], two[15:])
    assert not torch.allclose(one[6:15], two[6:15])


def test_two_passes_are_bit_equal_in_training_mode():
    """No dropout hides anywhere (X18)."""
    model = tiny_model().train()
    assert torch.equal(model(ids_of(30), [10, 20]), model(ids_of(30), [10, 20]))


@pytest.mark.parametrize("ids, lengths", [(torch.zeros(2, 3, dtype=torch.long), [3, 3]),
                                          (torch.zeros(6, dtype=torch.long), [3, 4])])
def test_a_pack_whose_lengths_do_not_sum_up_is_refused(ids, lengths):
    with pytest.raises(ValueError, match="packed"):
        tiny_model()(ids, lengths)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients and precision

@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_transformers(tmp_path, kind):
    hf = theirs(kind, tie_word_embeddings=True)
    hf.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = ids_of(20)
    torch.nn.functional.cross_entropy(hf(ids[None]).logits[0, :-1], ids[1:]).backward()
    torch.nn.functional.cross_entropy(logits(ours, ids)[:-1], ids[1:]).backward()
    want, got = dict(hf.named_parameters()), dict(ours.named_parameters())
    assert want.keys() == got.keys()
    for name, p in got.items():
        assert torch.allclose(p.grad, want[name].grad, atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_gives_the_same_gradients(kind, monkeypatch):
    model = tiny_model(kind)
    calls, real = [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k))
    grads = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        logits(model, ids_of(24), [10, 14]).square().mean().backward()
        grads.append({k: p.grad.clone() for k, p in model.named_parameters()})
    assert len(calls) == model.config.num_hidden_layers   # it ran, and only when asked
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name]), name
    with torch.no_grad():   # nothing to save where no gradient is wanted
        model(ids_of(4), [4])
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_products_are_close_to_fp32_and_leave_the_master_weights(kind):
    model = tiny_model(kind, scale=3.0)
    ids = ids_of(40)
    with torch.no_grad():
        want = logits(model, ids).log_softmax(-1)
        model.compute_dtype = torch.bfloat16
        hidden = model(ids, [40])
        got = logits(model, ids).log_softmax(-1)
    assert hidden.dtype == torch.bfloat16
    assert (got - want).abs().mean() < 0.02 and not torch.equal(got, want)
    logits(model, ids).square().mean().backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_residual_stream_is_fp32_in_bf16(monkeypatch):
    """A bf16 stream loses small updates of later layers: 256 + 0.5 is 256 in bf16."""
    seen = []
    real = model_module.rms_norm
    monkeypatch.setattr(model_module, "rms_norm", lambda x, *a: seen.append(x.dtype) or real(x, *a))
    model = tiny_model()
    model.compute_dtype = torch.bfloat16
    model(ids_of(5), [5])
    assert seen == [torch.float32] * (2 * model.config.num_hidden_layers + 1)


def test_rms_norm_is_summed_in_fp32():
    """Squares of 4096 entries near 4 in bf16: a bf16 sum would stop growing at 256 terms of its size."""
    x = (torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    weight = RMSNorm(4096).weight
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(rms_norm(x, weight, 1e-6, torch.bfloat16), want.bfloat16())
    assert (rms_norm(x, weight, 1e-6, torch.float32).double() - want).abs().max() < 1e-5
    big = torch.full((1, 8), 1e4, dtype=torch.float16)   # whose square is infinite in fp16
    assert torch.allclose(rms_norm(big, torch.ones(8), 1e-6, torch.float32), torch.ones(1, 8))


def test_eps_stands_inside_the_root():
    x = torch.tensor([[3e-3, 4e-3]])   # mean square 1.25e-5; with eps 1e-5 the root is sqrt(2.25e-5)
    got = rms_norm(x, torch.tensor([1.0, 2.0]), 1e-5, torch.float32)
    assert torch.allclose(got, torch.tensor([[3e-3, 8e-3]]) / 2.25e-5 ** 0.5)


def test_rope_of_a_hand_worked_pair():
    """D = 4, theta 100: angles of position 3 are 3 and 0.3; the pairs are (0, 2) and (1, 3)."""
    cos, sin = model_module.rope_angles(torch.tensor([3]), 4, 100.0)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    got = model_module.apply_rope(x, cos, sin)[0, 0]
    a, b = torch.tensor(3.0), torch.tensor(0.3)
    assert torch.allclose(got, torch.stack([a.cos(), -2 * b.sin(), a.sin(), 2 * b.cos()]), atol=1e-6)


def test_a_new_model_is_seeded_and_scaled():
    raw = tiny_config(hidden_size=128, head_dim=32, num_hidden_layers=8, intermediate_size=256)
    a, b, c = new_model(raw, 0), new_model(raw, 0), new_model(raw, 1)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(p, q)
        if p.ndim == 1:
            assert (p == 1).all()
            continue
        assert not torch.equal(p, r)
        want = 0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02   # 0.02 / sqrt(2 * 8)
        assert abs(p.std().item() / want - 1) < 0.05, name


# ----------------------------------------------------------------------------------------------------------------------
# Saving and loading

def reload(folder):
    hf, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return hf.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_of_ours_loads_in_transformers_and_back(tmp_path, kind, tied):
    """X39, X40: no key too many or too few, and the same logits, fp32 exact for us."""
    model = tiny_model(kind, tie_word_embeddings=tied, head_dim=12)
    save_model(model, tmp_path / "m", tiny_tokenizer())
    hf = reload(tmp_path / "m")
    assert type(hf).__name__ == KINDS[kind] and hf.config.tie_word_embeddings == tied
    saved = load_file(tmp_path / "m" / "model.safetensors")
    hf.save_pretrained(tmp_path / "hf")
    assert saved.keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()   # the reference set
    assert ("lm_head.weight" in saved) == (not tied)
    assert not any(k.startswith(("module.", "_orig_mod.", "base_model.")) for k in saved)
    ids = ids_of(30)
    with torch.no_grad():
        want = logits(model, ids)
        assert torch.equal(logits(load_model(tmp_path / "m"), ids), want)
        assert torch.equal(logits(load_model(tmp_path / "hf"), ids), want)
        assert (hf(ids[None]).logits[0] - want).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "m").encode("a 12") == tiny_tokenizer().encode("a 12")
    assert hf.generation_config.eos_token_id == EOS and hf.generation_config.pad_token_id == 0


def test_everything_of_config_json_survives_a_save(tmp_path):
    """Fields that we do not read (rope_theta's spelling, context, any other) are written back as they came."""
    hf = theirs("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, eos_token_id=[3, 7])
    hf.save_pretrained(tmp_path / "a")
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    a, b = (json.loads((tmp_path / x / "config.json").read_text()) for x in "ab")
    for raw in (a, b):
        raw.pop("transformers_version", None)
    assert a == b
    assert AutoConfig.from_pretrained(tmp_path / "b").rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_save_may_have_a_dtype_of_its_own(tmp_path, dtype):
    model = tiny_model()
    save_model(model, tmp_path / "m", dtype=dtype)
    assert {t.dtype for t in load_file(tmp_path / "m" / "model.safetensors").values()} == {dtype}
    assert AutoConfig.from_pretrained(tmp_path / "m").dtype == dtype
    assert next(model.parameters()).dtype == torch.float32
    back = load_model(tmp_path / "m")   # weights fp32 unless asked otherwise
    for p, q in zip(model.parameters(), back.parameters()):
        assert q.dtype == torch.float32 and torch.equal(p.to(dtype).float(), q)
    half = load_model(tmp_path / "m", dtype=torch.bfloat16)
    assert half.compute_dtype == torch.bfloat16 and next(half.parameters()).dtype == torch.bfloat16


def test_sharded_files_load(tmp_path):
    hf = theirs("qwen2", tie_word_embeddings=False)
    hf.save_pretrained(tmp_path / "one")
    hf.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    one, many = load_model(tmp_path / "one"), load_model(tmp_path / "many")
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), many.parameters()))


def test_a_save_into_a_folder_leaves_no_older_weights(tmp_path):
    """Shards and their index would be read in place of the new file; what else lies there is not ours to drop."""
    hf = theirs("qwen2", seed=4)
    hf.save_pretrained(tmp_path / "m", max_shard_size="30KB")
    (tmp_path / "m" / "README.md").write_text("mine")
    model = tiny_model(seed=5)
    save_model(model, tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "generation_config.json",
                                                                  "model.safetensors"]
    assert torch.equal(load_model(tmp_path / "m").head_weight, model.head_weight)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("in_generation, in_config, want", [
    ([3, 7], 7, (3, 7)), (3, 7, (3,)), (None, 7, (7,)), (None, [7, 8], (7, 8)), (None, None, ())])
def test_every_end_token_is_known(tmp_path, in_generation, in_config, want):
    """The set of end tokens comes from generation_config.json, else from config.json (X2)."""
    folder = tiny_folder(tmp_path / "m", eos_token_id=in_config)
    (folder / "generation_config.json").unlink()
    if in_generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    model = load_model(folder)
    assert model.eos_ids == want
    save_model(model, tmp_path / "again")
    assert load_model(tmp_path / "again").eos_ids == want


def test_derived_tensors_of_old_files_are_skipped(tmp_path):
    folder = tiny_folder(tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, folder / "model.safetensors")
    assert torch.equal(load_model(folder).head_weight, state["model.embed_tokens.weight"])


def test_a_repeated_tied_head_must_be_the_embedding(tmp_path):
    """T61: two copies of a tied head drift apart unseen."""
    folder = tiny_folder(tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors")
    assert torch.equal(load_model(folder).head_weight, state["lm_head.weight"])
    state["lm_head.weight"][3, 4] += 1e-3
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight differs"):
        load_model(folder)


def test_checkpoint_brings_weights_and_optimizer_back(tmp_path):
    """The step after a reload is the step that would have come, bit for bit."""
    def step(model, optimizer):
        optimizer.zero_grad()
        logits(model, ids_of(12)).square().mean().backward()
        optimizer.step()

    model = tiny_model()
    optimizer = make_optimizer(model, 1e-2)
    for _ in range(3):
        step(model, optimizer)
    save_checkpoint(tmp_path / "c", model, tiny_tokenizer(), optimizer, {"step": 3, "scores": {"a": [1, 2.5, None]}})
    step(model, optimizer)
    other = tiny_model(seed=9)
    other_optimizer = make_optimizer(other, 1e-2)
    assert load_checkpoint(tmp_path / "c", other, other_optimizer) == {"step": 3, "scores": {"a": [1, 2.5, None]}}
    step(other, other_optimizer)
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(p, q), name
    reload(tmp_path / "c")   # resume.pt beside it disturbs nobody


def test_a_folder_without_resume_pt_cannot_be_resumed(tmp_path):
    folder = tiny_folder(tmp_path / "m")
    with pytest.raises(UserError, match="holds no resume.pt"):
        load_checkpoint(folder, tiny_model(), make_optimizer(tiny_model(), 1e-3))


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, by name

def families():
    """Every config class of transformers whose name begins like one of our families."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = [n for n in CONFIG_MAPPING_NAMES if "llama" in n or n.startswith(("qwen2", "qwen3", "smollm"))]
    return [(n, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(n)) for n in sorted(names)]


@pytest.mark.parametrize("kind, architecture", families())
def test_only_the_three_shapes_of_the_families_are_taken(kind, architecture):
    """Llama 4, mllama, Qwen MoE, VL and the rest share names of fields with ours, and are other networks."""
    raw = {**tiny_config(), "model_type": kind, "architectures": [architecture or "SomethingForConditionalGeneration"]}
    if architecture in KINDS.values():
        assert Config.from_dict(raw).model_type in KINDS
    else:
        with pytest.raises(UserError, match="not supported"):
            Config.from_dict(raw)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_config_of_transformers_is_taken_as_it_means(kind):
    """Class defaults, to_dict() and to_diff_dict(): what a file leaves out has the value that transformers gives it."""
    config_class, model_class = THEIRS[kind]
    theirs_ = config_class()
    for raw in (theirs_.to_dict(), theirs_.to_diff_dict()):
        c = Config.from_dict({**raw, "architectures": [model_class.__name__],
                              **{k: getattr(theirs_, k) for k in ("vocab_size", "hidden_size", "intermediate_size",
                                                                   "num_hidden_layers", "num_attention_heads")}})
        for name in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
            assert getattr(c, name) == getattr(theirs_, name), name
        assert c.head_dim == (getattr(theirs_, "head_dim", None) or c.hidden_size // c.num_attention_heads)
        assert c.rope_theta == theirs_.rope_parameters["rope_theta"]
        assert c.qkv_bias == (kind == "qwen2") and c.qk_norm == (kind == "qwen3") and not c.o_bias


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_config_means_what_transformers_means(tmp_path, kind):
    """Only the sizes are given: head_dim, context, eps, theta and tying fall back as they do there."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
             "num_attention_heads": 4, **({} if kind == "llama" else {"num_key_value_heads": 2})}
    raw = {"architectures": [KINDS[kind]], "model_type": kind, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    hf = AutoConfig.from_pretrained(tmp_path)
    c = Config.from_dict(raw)
    assert (c.num_key_value_heads, c.rms_norm_eps, c.tie_word_embeddings, c.rope_theta, c.max_position_embeddings) == (
        hf.num_key_value_heads, hf.rms_norm_eps, hf.tie_word_embeddings, hf.rope_parameters["rope_theta"],
        hf.max_position_embeddings)
    assert c.head_dim == getattr(hf, "head_dim", 32 // 4)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
REFUSED = [
    ("llama", {"architectures": None}, "no `architectures`"),
    ("llama", {"architectures": []}, "no `architectures`"),
    ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
    ("qwen2", {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM is not supported"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling"),
    ("qwen2", {"rope_parameters": YARN}, "rope scaling"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
               "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling"),
    ("qwen3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, "rope"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial rotary"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
     "partial rotary"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}, "sliding window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
    ("llama", {"sliding_window": 256}, "sliding window"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"attention_dropout": 0.1}, "attention dropout"),
    ("llama", {"num_local_experts": 8}, "mixture of experts"),
    ("qwen3", {"num_experts": 64}, "mixture of experts"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization"),
    ("llama", {"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
]


@pytest.mark.parametrize("kind, change, said", REFUSED)
def test_a_config_that_we_do_not_compute_is_refused_by_name(tmp_path, kind, change, said):
    folder = tiny_folder(tmp_path / "m", kind)
    raw = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    with pytest.raises(UserError) as e:
        load_model(folder)
    assert said in str(e.value) and "config.json" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_window_that_is_not_used_is_no_window(kind):
    """Qwen configs carry sliding_window and max_window_layers with use_sliding_window false."""
    raw = tiny_config(kind, use_sliding_window=False, sliding_window=4096, max_window_layers=28,
                      layer_types=["full_attention"] * 2, attention_dropout=0.0)
    assert Config.from_dict(raw).model_type == kind


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                  "num_attention_heads"])
@pytest.mark.parametrize("value", ["absent", "many", -4, 0, None])
def test_a_size_that_is_missing_or_no_size_is_named(name, value):
    raw = tiny_config()
    raw.pop("head_dim")
    if value == "absent":
        raw.pop(name)
    else:
        raw[name] = value
    with pytest.raises(UserError, match=name):
        Config.from_dict(raw, where="some/config.json")


def broken(folder, what):
    """Breaks a model folder in one way -> the name that the error must hold."""
    state = load_file(folder / "model.safetensors")
    if what == "missing tensor":
        del state["model.layers.1.mlp.up_proj.weight"]
        save_file(state, folder / "model.safetensors")
        return "missing tensor model.layers.1.mlp.up_proj.weight"
    if what == "extra tensor":
        state["model.layers.2.mlp.up_proj.weight"] = torch.ones(2)
        save_file(state, folder / "model.safetensors")
        return "unexpected tensor model.layers.2.mlp.up_proj.weight"
    if what == "many missing tensors":
        save_file({k: v for k, v in state.items() if "layers.1" not in k}, folder / "model.safetensors")
        return "and 6 more"
    if what == "wrong shape":
        state["model.norm.weight"] = torch.ones(31)
        save_file(state, folder / "model.safetensors")
        return "model.norm.weight has shape [31], config.json asks for [32]"
    if what == "no config":
        (folder / "config.json").unlink()
        return "no config.json"
    if what == "config not JSON":
        (folder / "config.json").write_text("{'a': 1}")
        return "config.json: not valid JSON"
    if what == "config no object":
        (folder / "config.json").write_text("[1, 2]")
        return "config.json"
    if what == "config not text":
        (folder / "config.json").write_bytes(b"\xff\xfe{}")
        return "config.json: not valid JSON"
    if what == "no weights":
        (folder / "model.safetensors").unlink()
        return "model.safetensors is missing"
    if what == "cut weights":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-100])
        return "model.safetensors: cannot be read"
    if what == "empty weights":
        (folder / "model.safetensors").write_bytes(b"")
        return "model.safetensors: cannot be read"
    if what == "weights are no safetensors":
        (folder / "model.safetensors").write_text("version https://git-lfs" * 10)   # a pointer in place of the file
        return "model.safetensors: cannot be read"
    if what == "missing shard":
        names = {k: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, k in enumerate(state)}
        file = "model-00001-of-00002.safetensors"
        save_file({k: v for k, v in state.items() if names[k] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return "model-00002-of-00002.safetensors is missing"
    if what == "index without a map":
        (folder / "model.safetensors.index.json").write_text("{}")
        return "model.safetensors.index.json"


@pytest.mark.parametrize("what", ["missing tensor", "extra tensor", "many missing tensors", "wrong shape", "no config",
                                  "config not JSON", "config no object", "config not text", "no weights", "cut weights",
                                  "empty weights", "weights are no safetensors", "missing shard",
                                  "index without a map"])
def test_a_broken_folder_is_named(tmp_path, what):
    folder = tiny_folder(tmp_path / "m")
    said = broken(folder, what)
    with pytest.raises(UserError) as e:
        load_model(folder)
    assert said in str(e.value) and str(folder) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "nowhere", "/nowhere/at-all", "~/nowhere"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(UserError, match="no such folder") as e:
        load_model(name)
    assert name in str(e.value)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="no such folder"):
        load_model(tmp_path / "model.safetensors")


def test_a_hub_id_that_cannot_be_had_is_one_line(monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="neither a local folder nor a model") as e:
        load_model("no-such-owner/no-such-model")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name, value", [("rms_norm_eps", -1), ("rms_norm_eps", "tiny"), ("rms_norm_eps", float("nan")),
                                         ("rope_theta", -5), ("rope_theta", "x"), ("head_dim", 7), ("layer_types", 5),
                                         ("tie_word_embeddings", "false"), ("rope_parameters", 3),
                                         ("architectures", 7)])
def test_config_values_of_the_wrong_kind_are_refused_by_name(name, value):
    raw = model_module.llama_config(64, 32, 1, 4, 2, 48)
    with pytest.raises(UserError, match="config.json"):
        Config.from_dict({**raw, name: value})


def test_eos_ids_must_be_in_the_vocabulary(tmp_path):
    model = tiny_model("llama")
    model.eos_ids = (model.config.vocab_size,)
    save_model(model, tmp_path / "m")
    with pytest.raises(UserError, match="eos_token_id"):
        load_model(tmp_path / "m")
