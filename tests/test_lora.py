"""
LoRA: the same numbers and files as the package peft, a frozen base, a sampler that has the adapter, a start of the run
that has it too (X37 to X40), and the scripts with --lora-rank and --adapter.
"""
import copy
import json
import math
import types

import pytest
import torch
from helpers import problem, tiny_folder, tiny_model, tiny_tokenizer, write_rows
from launch import jsonl, metrics, refused, run
from safetensors.torch import load_file, save_file

import common
import model as model_module
from common import UserError
from engine import Engine
from eval_passk import kl_to_start
from model import (
    TARGETS,
    add_lora,
    find_adapter,
    frozen_copy,
    load_adapter,
    load_checkpoint,
    load_model,
    save_adapter,
    save_checkpoint,
)
from train_sft import as_batch, sft_loss

torch.set_num_threads(1)
IDS = torch.randint(5, 200, (24,), generator=torch.Generator().manual_seed(0))
ROWS = [([5, 6, 7], [9 + i, 40, 11, 1]) for i in range(6)]   # (prompt ids, completion ids)
PROMPTS = [[5, 6, 7], [30, 31], [99] * 9]


def logits(model, ids=IDS):
    with torch.no_grad():
        return common.output_logits(model(ids, [len(ids)]), model.head_weight)


def with_adapter(model, std=0.1, **how):
    """An adapter as training leaves it: B is no longer zero."""
    add_lora(model, **{"rank": 4, "seed": 1, **how})
    gen = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith("lora_B"):
                p.copy_(std * torch.randn(p.shape, generator=gen))
    return model


def sft_gradient(model, rows=ROWS):
    """Leaves the gradient of the mean loss over the completions' tokens."""
    ids, mask, length = as_batch(rows)
    p = common.pack_rows(ids, mask, length, range(len(rows)), model.device)
    hidden = model(p.ids, p.lengths)[p.where]
    grad, _ = common.head_backward(hidden, model.head_weight, p.targets,
                                   lambda logp, entropy, at: sft_loss(logp, entropy, at, len(p.targets)))
    hidden.backward(grad)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        sft_gradient(model)
        optimizer.step()
        optimizer.zero_grad()


def split(model):
    """-> (frozen, trained) parameters by name, as copies."""
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    return ({n: p for n, p in named.items() if "lora_" not in n}, {n: p for n, p in named.items() if "lora_" in n})


# ----------------------------------------------------------------------------------------------------------------------
# The layer

def test_a_hand_worked_layer():
    layer = model_module.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 0], [0, 1]])
    layer.lora_A, layer.lora_B = (torch.nn.Parameter(torch.tensor(x)) for x in ([[1.0, 2.0]], [[3.0], [-1.0]]))
    layer.lora_scale = 0.5
    # A x = 1 * 1 + 2 * 10 = 21; B A x / 2 = (31.5, -10.5)
    assert layer(torch.tensor([[1.0, 10.0]])).tolist() == [[32.5, -0.5]]


def test_the_start_is_the_base_and_only_the_adapter_is_trained():
    base, model = tiny_model(), tiny_model()
    add_lora(model, 4, seed=3)
    assert torch.equal(logits(base), logits(model))
    frozen, trained = split(model)
    assert len(trained) == 2 * len(TARGETS) * 2 and all(p.dtype == torch.float32 for p in trained.values())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(trained)
    assert model.num_trained() == sum(p.numel() for p in trained.values()) < model.num_params() / 3
    assert model.adapter.scale == 2   # alpha is 2 r
    for n, p in trained.items():
        if n.endswith("lora_A"):   # kaiming_uniform(a = sqrt(5)): uniform in +-1 / sqrt(in)
            bound = 1 / math.sqrt(p.shape[1])
            assert 0.8 * bound < p.abs().max() <= bound and abs(p.mean()) < 4 * bound / math.sqrt(3 * p.numel())
        else:
            assert not p.any()
    again, other = tiny_model(), tiny_model()
    state = torch.random.get_rng_state()
    add_lora(again, 4, seed=3)
    add_lora(other, 4, seed=4)
    assert torch.equal(state, torch.random.get_rng_state())   # its own generator
    assert all(torch.equal(p, trained[n]) for n, p in split(again)[1].items())
    assert not any(torch.equal(p, trained[n]) for n, p in split(other)[1].items() if n.endswith("lora_A"))


def test_the_frozen_matrices_lie_in_the_dtype_of_the_products_and_no_number_changes():
    base, model = tiny_model("qwen2", scale=3.0), tiny_model("qwen2", scale=3.0)
    base.compute_dtype = model.compute_dtype = torch.bfloat16
    add_lora(model, 4)
    assert torch.equal(logits(base), logits(model))
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert {d for n, d in dtypes.items() if n.endswith("proj.weight")} == {torch.bfloat16}
    assert {d for n, d in dtypes.items() if not n.endswith("proj.weight")} == {torch.float32}


def test_targets_and_what_is_no_target():
    model = with_adapter(tiny_model(), targets=["q_proj", "v_proj"])
    assert {n.split(".")[-2] for n in split(model)[1]} == {"q_proj", "v_proj"}
    for wrong in (["lm_head"], ["q_proj", "w_proj"], ["embed_tokens"]):
        with pytest.raises(UserError, match=f"--lora-targets {wrong[-1]}: .*there is q_proj k_proj"):
            add_lora(tiny_model(tie_word_embeddings=False), 4, targets=wrong)


# ----------------------------------------------------------------------------------------------------------------------
# The real peft, both ways

def as_peft(folder, adapter=None, **config):
    """transformers' model of `folder` with the adapter in a folder, or with a new one of LoraConfig(**config)."""
    peft = pytest.importorskip("peft", reason="needs package peft")
    from transformers import AutoModelForCausalLM
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        return peft.PeftModel.from_pretrained(hf, adapter, is_trainable=True)
    theirs = peft.get_peft_model(hf, peft.LoraConfig(task_type="CAUSAL_LM", **{"lora_dropout": 0.1, **config})).eval()
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            if "lora_B" in n:
                p.copy_(0.1 * torch.randn(p.shape, generator=gen))
    return theirs


@pytest.mark.parametrize("kind, tied, how", [
    ("llama", True, {"rank": 4}), ("qwen2", True, {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "down_proj"]}),
    ("qwen3", False, {"rank": 16, "alpha": 16})])
def test_peft_loads_ours_with_the_same_logits_and_keys(kind, tied, how, tmp_path):
    folder = tiny_folder(tmp_path / "base", kind, scale=3.0, tie_word_embeddings=tied)
    ours = with_adapter(load_model(folder), base=str(folder), base_sha256="00", **how)
    save_adapter(ours, tmp_path / "a")
    theirs = as_peft(folder, tmp_path / "a")
    with torch.no_grad():
        got, bare = theirs(IDS[None]).logits[0], logits(load_model(folder))
    assert (got - logits(ours)).abs().max() < 1e-5 and (got - bare).abs().max() > 0.1
    theirs.save_pretrained(tmp_path / "p")   # X40: exactly the keys that peft itself writes
    a, b = (load_file(tmp_path / x / "adapter_model.safetensors") for x in "ap")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in a
    mine, its = (json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in "ap")
    for config in (mine, its):
        config["target_modules"] = sorted(config["target_modules"])
    assert mine == {k: its.get(k) for k in mine}
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["adapter_config.json", "adapter_model.safetensors",
                                                                  "base.json"]


@pytest.mark.parametrize("config", [
    {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
    {"r": 2, "target_modules": r".*layers\.1\.(self_attn\.o_proj|mlp\.up_proj)"},
    {"r": 2, "target_modules": ["model.layers.0.mlp.gate_proj"], "init_lora_weights": "gaussian"}],
    ids=["list", "rslora", "pattern", "one"])
def test_an_adapter_of_peft_loads_with_the_same_logits(config, tmp_path):
    folder = tiny_folder(tmp_path / "base", scale=3.0)
    theirs = as_peft(folder, **config)
    theirs.save_pretrained(tmp_path / "p")
    ours = load_model(folder)
    load_adapter(ours, tmp_path / "p", str(folder), common.sha256_model(folder))
    with torch.no_grad():
        want = theirs(IDS[None]).logits[0]
    assert (logits(ours) - want).abs().max() < 1e-5 and (want - logits(load_model(folder))).abs().max() > 1e-3
    save_adapter(ours, tmp_path / "again")   # and it goes on as what it was
    assert load_file(tmp_path / "again" / "adapter_model.safetensors").keys() == load_file(
        tmp_path / "p" / "adapter_model.safetensors").keys()
    with torch.no_grad():
        assert (as_peft(folder, tmp_path / "again")(IDS[None]).logits[0] - want).abs().max() < 1e-5


def test_gradients_of_the_adapter_equal_those_of_peft(tmp_path):
    folder = tiny_folder(tmp_path / "base", "qwen3", scale=3.0)
    ours = with_adapter(load_model(folder))
    save_adapter(ours, tmp_path / "a")
    theirs = as_peft(folder, tmp_path / "a").eval()
    sft_gradient(ours)
    total = sum(len(y) for _, y in ROWS)
    for x, y in ROWS:
        logp = theirs(torch.tensor([x + y])).logits[0].log_softmax(-1)
        (-sum(logp[len(x) + i - 1, t] for i, t in enumerate(y)) / total).backward()
    want = {n.replace("base_model.model.", "").replace(".default.weight", ""): p.grad
            for n, p in theirs.named_parameters() if p.requires_grad}
    got = {n: p.grad for n, p in ours.named_parameters() if p.requires_grad}
    assert got.keys() == want.keys() and all(p.grad is None for p in ours.parameters() if not p.requires_grad)
    for n, g in got.items():
        assert g.abs().max() > 0 and torch.allclose(g, want[n], rtol=1e-4, atol=1e-6), n


# ----------------------------------------------------------------------------------------------------------------------
# Training: what moves, and what does not (X38)

@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_step_moves_the_adapter_alone_and_the_saved_file_differs(compute, tmp_path):
    model = tiny_model(scale=3.0)
    model.compute_dtype = compute
    add_lora(model, 4)
    frozen, trained = split(model)
    save_adapter(model, tmp_path / "before")
    optimizer = common.make_optimizer(model, 1e-2)
    assert sum(p.numel() for g in optimizer.param_groups for p in g["params"]) == model.num_trained() > 0
    train(model, optimizer, 2)   # at the first, the gradient of A is zero as B is
    save_adapter(model, tmp_path / "after")
    now, moved = split(model)
    assert all(torch.equal(now[n], p) for n, p in frozen.items())
    assert not any(torch.equal(moved[n], p) for n, p in trained.items())
    before, after = (load_file(tmp_path / x / "adapter_model.safetensors") for x in ("before", "after"))
    assert not any(torch.equal(before[k], after[k]) for k in before)


def test_a_model_of_which_nothing_is_trained_has_no_optimizer():
    with pytest.raises(ValueError, match="no weight"):
        common.make_optimizer(tiny_model().requires_grad_(False), 1e-3)


def test_layers_recomputed_in_the_backward_pass_give_the_same_gradients():
    a, b = with_adapter(tiny_model()), with_adapter(tiny_model())
    b.checkpointing = True
    for m in (a, b):
        sft_gradient(m)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters()) if p.requires_grad)


def test_a_checkpoint_brings_adapter_and_optimizer_back(tmp_path):
    model = tiny_model()
    add_lora(model, 4, base_sha256="11")
    optimizer = common.make_optimizer(model, 1e-2)
    train(model, optimizer, 2)
    save_checkpoint(tmp_path / "c", model, tiny_tokenizer(), optimizer, {"step": 2})
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["adapter_config.json", "adapter_model.safetensors",
                                                                  "base.json", "resume.pt"]
    other = tiny_model()
    add_lora(other, 4, seed=9)
    second = common.make_optimizer(other, 1e-2)
    assert load_checkpoint(tmp_path / "c", other, second) == {"step": 2}
    for m, o in ((model, optimizer), (other, second)):
        train(m, o, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
    whole = tiny_model()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        load_checkpoint(tmp_path / "c", whole, common.make_optimizer(whole, 1e-2))


def test_the_same_adapter_is_the_same_bytes(tmp_path):
    model = with_adapter(tiny_model(), base="b", base_sha256="11")
    for i in range(8):
        save_adapter(model, tmp_path / str(i))
    for name in ("adapter_config.json", "adapter_model.safetensors", "base.json"):
        assert len({(tmp_path / str(i) / name).read_bytes() for i in range(8)}) == 1
    again = tiny_model()
    load_adapter(again, tmp_path / "0", "b", "11")
    save_adapter(again, tmp_path / "again")
    assert (tmp_path / "again" / "adapter_config.json").read_text() == (
        tmp_path / "0" / "adapter_config.json").read_text()


def test_memory_and_disk_count_the_trained_weights(monkeypatch, tmp_path):
    def need(model, optim="adamw", slots=0):
        args = types.SimpleNamespace(micro_batch_tokens=1024, keep=1, max_steps=1, optim=optim)
        run = types.SimpleNamespace(args=args, folder=tmp_path, remark="")
        run.note = types.MethodType(common.Run.note, run)
        monkeypatch.setattr(common, "memory_free", lambda device: (2 ** 40, 2 ** 40))
        common.check_room(run, model, row_tokens=64, rows_a_step=8, slots=slots)
        return run.room["fixed"]
    size = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    whole, lora = tiny_model(**size), tiny_model(**size)
    add_lora(lora, 4, targets=["q_proj", "o_proj"])
    matrices = 2 * 2 * 128 * 128
    assert need(whole) - need(lora) == 12 * (whole.num_params() - lora.num_trained())
    cache = need(whole, slots=4) - need(whole)
    assert need(lora, slots=4) - need(lora) == cache + 4 * matrices   # the merged copy of what is adapted


# ----------------------------------------------------------------------------------------------------------------------
# The sampler (X34, X35): what it samples from is the base with the adapter of now

def gap(model, r, temperature=1.0):
    """Largest difference of the recorded log-probs and those of the trainer."""
    logp, entropy = common.score(model, r, temperature)
    sampled = r.mask[:, 1:]
    return (logp - r.logp)[sampled].abs().max().item()


@pytest.mark.parametrize("kind, targets", [("llama", None), ("qwen2", ["k_proj", "up_proj"]), ("qwen3", ["o_proj"])])
def test_the_merged_sampler_has_the_log_probs_of_the_trainer_after_every_step(kind, targets):
    model = tiny_model(kind, scale=3.0)
    add_lora(model, 4, targets=targets)
    engine, base = Engine(model, slots=5), Engine(tiny_model(kind, scale=3.0), slots=5)
    start = engine.generate(PROMPTS, 4, max_new=12, seed=1)
    assert torch.equal(start.ids, base.generate(PROMPTS, 4, max_new=12, seed=1).ids) and gap(model, start) < 1e-5
    places = [x.data_ptr() for w in engine.layers for x in (w.qkv[0], w.o[0], w.gate_up[0], w.down[0])]
    frozen, optimizer = split(model)[0], common.make_optimizer(model, 0.05)
    for _ in range(2):
        train(model, optimizer)
        r = engine.generate(PROMPTS, 4, max_new=12, seed=1)
        assert gap(model, r) < 1e-5 and gap(model, start) > 1e-2
        start = r
    # captured graphs read these places
    assert places == [x.data_ptr() for w in engine.layers for x in (w.qkv[0], w.o[0], w.gate_up[0], w.down[0])]
    assert all(torch.equal(p, frozen[n]) for n, p in split(model)[0].items())
    common.check_sampler(1, {}, model, r)


def test_what_has_no_adapter_is_shared_and_an_adapter_may_come_after_the_engine():
    model = tiny_model(scale=3.0)
    engine = Engine(model)
    with_adapter(model, targets=["q_proj", "v_proj"])
    assert gap(model, engine.generate(PROMPTS, 2, max_new=8)) < 1e-5
    a, w = model.model.layers[0].self_attn, engine.layers[0]
    assert w.o[0].data_ptr() == a.o_proj.weight.data_ptr() and w.qkv[0].data_ptr() != a.q_proj.weight.data_ptr()
    assert engine.embed.data_ptr() == model.head_weight.data_ptr()


def test_a_small_adapter_is_not_lost_in_a_bf16_sampler():
    """Entries of B A of a tenth of the distance of two bf16 numbers: rounded to the nearest, they would be gone."""
    model = tiny_model(hidden_size=256, head_dim=64, intermediate_size=512).to(torch.bfloat16).float()
    model.compute_dtype = torch.bfloat16
    bare = Engine(copy.deepcopy(model))
    add_lora(model, 1, alpha=1)
    engine = Engine(model)
    layer, merged = model.model.layers[0].mlp.down_proj, engine.layers[0].down[0]
    assert torch.equal(merged, bare.layers[0].down[0])   # B is 0: the base exactly
    with torch.no_grad():
        layer.weight.fill_(0.02)   # its neighbours in bf16 are 1.2e-4 away
        layer.lora_A.fill_(1.2e-5)
        layer.lora_B.fill_(1.0)
    engine.refresh()
    w = layer.weight.float()
    assert torch.equal((w + 1.2e-5).bfloat16(), layer.weight)
    assert set(merged.unique().tolist()) == {0.02001953125, 0.0201416015625}
    assert (merged.float() - w).mean().item() == pytest.approx(1.2e-5, rel=0.05)
    first = merged.clone()
    engine.refresh()
    assert torch.equal(first, merged)   # the same adapter, the same sampler


def test_the_bf16_sampler_is_close_to_the_trainer():
    model = tiny_model(scale=3.0)
    model.compute_dtype = torch.bfloat16
    with_adapter(model, std=0.3)
    r = Engine(model).generate(PROMPTS, 8, max_new=16, seed=2)
    assert gap(model, r) < 0.1 and gap(tiny_model(scale=3.0), r) > 0.3
    common.check_sampler(1, {}, model, r)


# ----------------------------------------------------------------------------------------------------------------------
# The reference is the start of the run, its adapter with it (X37)

def starts(tmp_path):
    yield tiny_model(scale=3.0)                                                     # a base
    tuned = tiny_model(scale=3.0)
    train(tuned, common.make_optimizer(tuned, 1e-2), 3)
    yield tuned                                                                     # fine-tuned
    fresh = tiny_model(scale=3.0)
    add_lora(fresh, 4)
    yield fresh                                                                     # a new adapter
    other = tiny_model(scale=3.0)
    add_lora(other, 4)
    train(other, common.make_optimizer(other, 5e-2), 3)
    save_adapter(other, tmp_path / "sft")
    loaded = tiny_model(scale=3.0)
    load_adapter(loaded, tmp_path / "sft")
    yield loaded                                                                    # a trained one


def test_the_kl_to_the_start_is_zero_at_step_0_and_grows(tmp_path):
    for model in starts(tmp_path):
        start, engine = frozen_copy(model), Engine(model)
        r = engine.generate(PROMPTS, 8, max_new=16, seed=3)
        assert abs(kl_to_start(r, start, 1.0)) < 1e-6
        assert not any(p.requires_grad for p in start.parameters())
        before = logits(start)
        train(model, common.make_optimizer(model, 2e-2), 3)
        assert torch.equal(before, logits(start))   # what is shared does not move
        assert kl_to_start(engine.generate(PROMPTS, 8, max_new=16, seed=3), start, 1.0) > 1e-3
    bare = tiny_model(scale=3.0)   # the last start against the wrong reference
    assert abs(kl_to_start(r, bare, 1.0)) > 1e-2


def test_the_frozen_copy_shares_the_base_and_copies_the_adapter():
    model = with_adapter(tiny_model())
    start = frozen_copy(model)
    for (n, p), q in zip(model.named_parameters(), start.parameters()):
        assert (p is q) == ("lora_" not in n), n
    whole = tiny_model()
    assert not any(p is q for p, q in zip(whole.parameters(), frozen_copy(whole).parameters()))
    assert all(p.requires_grad for p in whole.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, by name

CONFIGS = [({"use_dora": True}, "use_dora true"), ({"bias": "all"}, "bias 'all'"), ({"lora_bias": True}, "lora_bias"),
           ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
           ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"), ({"layers_to_transform": [0]}, "layers_to_transform"),
           ({"fan_in_fan_out": True}, "fan_in_fan_out"), ({"peft_type": "IA3"}, "peft_type IA3"),
           ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"), ({"use_new_trick": True}, "use_new_trick"),
           ({"r": 0}, "r is 0"), ({"r": "8"}, "r is '8'"), ({"lora_alpha": None}, "lora_alpha is None"),
           ({"target_modules": []}, "target_modules is []"), ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
           ({"target_modules": "(("}, "not a pattern"), ({"target_modules": "nothing"}, "nothing"),
           ({"target_modules": ["q_proj"]}, "unexpected tensor"), ({"r": 5}, "has shape [4, 48]"),
           ({"lora_alpha": 10 ** 400}, "lora_alpha is 1000"), ({"use_rslora": "false"}, "use_rslora is 'false'")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    base = tmp_path_factory.mktemp("saved")
    save_adapter(with_adapter(tiny_model(), base="data/tiny", base_sha256="ab" * 32), base / "a")
    return base / "a"


def copied(saved, tmp_path, **change):
    """The adapter with another config."""
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes((saved / "adapter_model.safetensors").read_bytes())
    config = json.loads((saved / "adapter_config.json").read_text()) | change
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("change, said", CONFIGS, ids=[c[1] for c in CONFIGS])
def test_an_adapter_that_is_not_computed_here_is_refused_by_name(change, said, saved, tmp_path):
    model = tiny_model()
    with pytest.raises(UserError) as e:
        load_adapter(model, copied(saved, tmp_path, **change))
    assert said in str(e.value) and "\n" not in str(e.value), e.value
    assert model.adapter is None


def test_dropout_matters_in_training_only(saved, tmp_path):
    model = tiny_model()
    load_adapter(model, copied(saved, tmp_path, lora_dropout=0.1))
    assert torch.equal(logits(model), logits(with_adapter(tiny_model())))


@pytest.mark.parametrize("sizes, said", [({"intermediate_size": 64}, "lora_B.weight has shape|lora_A.weight has shape"),
                                         ({"num_hidden_layers": 3}, "missing tensor .*layers.2"),
                                         ({"num_hidden_layers": 1}, "unexpected tensor .*layers.1")])
def test_another_base_is_refused(sizes, said, saved):
    with pytest.raises(UserError, match=said):
        load_adapter(tiny_model(**sizes), saved)


def test_the_hash_of_the_base_is_compared_and_a_mere_name_is_said(saved, tmp_path, capsys):
    with pytest.raises(UserError, match="trained on data/tiny .hash abababababab.*hash cdcd"):
        load_adapter(tiny_model(), saved, "other/model", "cd" * 32)
    load_adapter(tiny_model(), saved, "a/copy", "ab" * 32)
    assert capsys.readouterr().out == ""
    load_adapter(tiny_model(), copied(saved, tmp_path), "a/copy", "ab" * 32)   # without base.json, as from peft
    assert "its base is data/tiny, --model is a/copy" in capsys.readouterr().out


def test_files_that_are_broken_or_missing(saved, tmp_path):
    folder = copied(saved, tmp_path)
    data = (saved / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        load_adapter(tiny_model(), folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="adapter_model.safetensors is missing"):
        load_adapter(tiny_model(), folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_adapter(tiny_model(), folder)
    with pytest.raises(UserError, match="no adapter there"):
        find_adapter(str(tmp_path / "nowhere"))
    assert find_adapter(str(saved)) == saved.resolve()


def test_an_index_of_no_names_and_a_folder_in_place_of_a_file(saved, tmp_path):
    folder = copied(saved, tmp_path)
    (folder / "adapter_model.safetensors.index.json").write_text('{"weight_map": {"a": 1, "b": "x"}}')
    with pytest.raises(UserError, match="weight_map"):
        load_adapter(tiny_model(), folder)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()
    with pytest.raises(UserError, match="adapter_config.json: cannot be read .Is a directory"):
        load_adapter(tiny_model(), folder)


@pytest.mark.parametrize("value, said", [(torch.nan, "lora_A.weight holds NaN or inf"),
                                         (torch.int8, "lora_A.weight holds torch.int8")])
def test_an_adapter_of_no_numbers_is_refused(value, said, saved, tmp_path):
    folder = copied(saved, tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = min(tensors)
    tensors[key] = tensors[key].to(value) if isinstance(value, torch.dtype) else tensors[key].fill_(value)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=said):
        load_adapter(tiny_model(), folder)


def test_a_resume_pt_that_is_empty_or_something_else_is_refused(tmp_path):
    model = with_adapter(tiny_model())
    optimizer = common.make_optimizer(model, 1e-3)
    save_checkpoint(tmp_path / "c", model, tiny_tokenizer(), optimizer, {"step": 1})
    no_step = {"optimizer": optimizer.state_dict(), "run": {}}
    for write in (lambda path: path.write_bytes(b""), lambda path: torch.save([1], path),
                  lambda path: torch.save(no_step, path)):
        write(tmp_path / "c" / "resume.pt")
        with pytest.raises(UserError, match="is not whole"):
            load_checkpoint(tmp_path / "c", model, optimizer)


def test_a_rank_above_every_layer_is_refused():
    for rank in (10 ** 6, 10 ** 30):
        with pytest.raises(UserError, match=f"--lora-rank {rank}: no adapted layer has more than"):
            add_lora(tiny_model(), rank)


# ----------------------------------------------------------------------------------------------------------------------
# The scripts

def sft_rows(base):
    return write_rows(base / "sft.jsonl", [{"prompt": problem(i, f"{i + 100}?", 1)["prompt"], "completion": [
        {"role": "assistant", "content": f"#### {1 + i % 2}"}]} for i in range(20)])


def flags(guesser, tasks, folder, *more):
    return ["--model", guesser, "--tasks-dir", tasks, "--lr", "3e-3", "--warmup", 0, "--eval-n", 0, "--labbook",
            folder.parent / "labbook.md", "--output-dir", folder, *more]


def grpo(guesser, tasks, folder, *more):
    return ["train_grpo.py", *flags(guesser, tasks, folder, "--max-new", 24, "--prompts-per-step", 4, *more)]


def done(*command):
    got = run(*command)
    assert got.returncode == 0, got.stderr[-2000:]
    return got


def adapter_bytes(folder):
    return (folder / "checkpoint" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def sft_run(guesser, tasks, tmp_path_factory):
    base = tmp_path_factory.mktemp("sft")
    got = done("train_sft.py", "--data", sft_rows(base), *flags(guesser, tasks, base / "run", "--lora-rank", 4,
               "--max-steps", 6, "--rows-per-step", 8))
    return base / "run", got.stdout


def test_sft_with_an_adapter_leaves_an_adapter_and_says_so(sft_run, guesser):
    folder, said = sft_run
    assert "of them trained (LoRA rank 4, alpha 8)" in said
    model = load_model(guesser)
    load_adapter(model, find_adapter(str(folder)), str(guesser), common.sha256_model(guesser))
    assert any(p.any() for n, p in model.named_parameters() if n.endswith("lora_B"))
    config = json.loads((folder / "checkpoint" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(guesser) and config["r"] == 4
    assert json.loads((folder / "checkpoint" / "base.json").read_text()) == {
        "name": str(guesser), "sha256": common.sha256_model(guesser)}
    final = json.loads((folder / "final.json").read_text())
    assert final["config"]["trained_parameters"] == model.num_trained() and final["config"]["lora_alpha"] == 8
    assert final["model"] == {"name": str(guesser), "sha256": common.sha256_model(guesser)}


def test_rank_alpha_targets_and_seed_each_give_another_adapter(guesser, tasks, tmp_path):
    data, found = sft_rows(tmp_path), []
    for i, more in enumerate([[], ["--lora-rank", 2], ["--lora-alpha", 2], ["--lora-targets", "q_proj", "up_proj"],
                              ["--seed", 1]]):
        folder = tmp_path / f"run{i}"
        done("train_sft.py", "--data", data, *flags(guesser, tasks, folder, "--lora-rank", 4, "--max-steps", 2, *more))
        model = load_model(guesser)
        load_adapter(model, find_adapter(str(folder)))
        config = json.loads((folder / "checkpoint" / "adapter_config.json").read_text())
        found.append((config["r"], config["lora_alpha"], len(config["target_modules"])))
        assert not any(torch.equal(logits(model), x) for x in found if isinstance(x, torch.Tensor))
        found.append(logits(model))
    assert found[::2] == [(4, 8, 7), (2, 4, 7), (4, 2, 7), (4, 8, 2), (4, 8, 7)]


def test_grpo_goes_on_with_an_sft_adapter_which_is_its_reference(sft_run, guesser, tasks, tmp_path):
    """k3 at the tokens of step 1, before the first update: 0 against the adapter, not against the bare base (T58)."""
    sft, _ = sft_run
    got = done(*grpo(guesser, tasks, tmp_path / "run", "--adapter", sft, "--beta", 0.1, "--kl-estimator", "k3",
                     "--max-steps", 3, "--optim", "adamw"))
    assert "LoRA rank 4" in got.stdout
    kl = [row["kl"] for row in metrics(tmp_path / "run")]
    assert abs(kl[0]) < 1e-6 < kl[2]
    assert all(row["mismatch"] < 1e-5 for row in metrics(tmp_path / "run"))
    assert adapter_bytes(tmp_path / "run") != adapter_bytes(sft)
    record = json.loads((tmp_path / "run" / "final.json").read_text())["model"]
    assert record["adapter"] == {"name": str(sft), "sha256": common.sha256_model(sft / "checkpoint")}
    assert record["sha256"] == common.sha256_model(guesser, sft / "checkpoint") != record["base_sha256"]


@pytest.mark.parametrize("script, more", [("train_rft.py", ["--arm", "rft_shortest_braked"]),
                                          ("train_opd.py", ["--hint", ""])], ids=["rft", "opd"])
def test_the_others_start_from_an_adapter_too(script, more, sft_run, guesser, tasks, tmp_path):
    sft, _ = sft_run
    done(script, *grpo(guesser, tasks, tmp_path / "run", "--adapter", sft, "--max-steps", 2, *more)[1:])
    row = metrics(tmp_path / "run")[0]
    assert abs(row["kl"]) < 1e-6 and row["mismatch"] < 1e-5   # without a hint, the teacher is the student at step 0
    assert adapter_bytes(tmp_path / "run") != adapter_bytes(sft)


def test_a_run_cut_in_the_middle_goes_on_as_if_it_were_not(sft_run, guesser, tasks, tmp_path):
    more = ["--adapter", sft_run[0], "--beta", 0.1, "--keep", 2, "--save-every", 2]
    done(*grpo(guesser, tasks, tmp_path / "whole", *more, "--max-steps", 6))
    done(*grpo(guesser, tasks, tmp_path / "cut", *more, "--max-steps", 3))
    done("train_grpo.py", "--resume", tmp_path / "cut", "--max-steps", 6, "--labbook", tmp_path / "labbook.md")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert (tmp_path / "whole" / "samples.jsonl").read_bytes() == (tmp_path / "cut" / "samples.jsonl").read_bytes()
    assert adapter_bytes(tmp_path / "whole") == adapter_bytes(tmp_path / "cut")
    kept = sorted(p.name for p in (tmp_path / "whole").glob("checkpoint-*"))
    assert kept == ["checkpoint-000004", "checkpoint-000006"]


def test_an_evaluation_with_an_adapter_is_one_of_another_model(sft_run, guesser, tasks, tmp_path):
    sft, results = sft_run[0], {}
    for name, more in [("base", []), ("run", ["--adapter", sft]), ("folder", ["--adapter", sft / "checkpoint"])]:
        done("eval_passk.py", "--model", guesser, "--tasks-dir", tasks, "--n", 8, "--max-new", 24, "--device", "cpu",
             "--out", tmp_path / name, "--labbook", tmp_path / "labbook.md", *more)
        results[name] = json.loads((tmp_path / name).read_text())
    base, first, second = results.values()
    assert base["adapter"] is None and first["adapter"] == str(sft)
    assert base["model_sha256"] == common.sha256_model(guesser) != first["model_sha256"] == second["model_sha256"]
    assert base["problems"] != first["problems"] == second["problems"]
    record = common.read_labbook(tmp_path / "labbook.md")[0][1]
    assert record["model"]["adapter"]["sha256"] == common.sha256_model(sft / "checkpoint")


def test_the_best_weights_of_a_run_with_an_adapter_are_an_adapter_that_can_be_evaluated(guesser, tasks, tmp_path):
    folder, data = tmp_path / "run", sft_rows(tmp_path)
    valid = write_rows(tmp_path / "valid.jsonl", [{"prompt": problem(i, f"{i + 100}?", 1)["prompt"], "completion": [
        {"role": "assistant", "content": "#### 9"}]} for i in range(6)])
    done("train_sft.py", "--data", data, "--valid", valid, "--valid-every", 1, *flags(
        guesser, tasks, folder, "--lora-rank", 4, "--rows-per-step", 8, "--max-steps", 8, "--schedule", "constant",
        "--lr", "5e-2"))
    losses = json.loads((folder / "final.json").read_text())["losses"]
    assert losses["valid_lowest_step"] < 8 and losses["valid_lowest"] < losses["valid"]
    assert not (folder / "best" / "model.safetensors").exists()
    results = []
    for place in (folder / "best", folder):
        done("eval_passk.py", "--model", guesser, "--adapter", place, "--tasks-dir", tasks, "--n", 8, "--max-new", 24,
             "--device", "cpu", "--out", tmp_path / f"{place.name}.json")
        results.append(json.loads((tmp_path / f"{place.name}.json").read_text()))
    best, last = results
    assert best["model_sha256"] == common.sha256_model(guesser, folder / "best") != last["model_sha256"]
    assert best["problems"] != last["problems"]
    # and a run goes on from it
    done(*grpo(guesser, tasks, tmp_path / "next", "--adapter", folder / "best", "--max-steps", 1))


def test_a_pool_of_another_adapter_is_refused(sft_run, guesser, tasks, tmp_path):
    pool, rows = tmp_path / "pool.jsonl", jsonl(tasks / "train.jsonl")
    write_rows(pool, rows)

    def screened_with(adapter):
        (tmp_path / "pool.jsonl.meta.json").write_text(json.dumps({"sha256": common.sha256_file(pool), "model": {
            "name": "m", "sha256": common.sha256_model(guesser, adapter)}}))
    screened_with(None)
    refused(run(*grpo(guesser, tasks, tmp_path / "run", "--adapter", sft_run[0], "--pool", pool)), "screened with")
    screened_with(sft_run[0] / "checkpoint")
    done(*grpo(guesser, tasks, tmp_path / "run", "--adapter", sft_run[0], "--pool", pool, "--max-steps", 1))


def test_wrong_commands_are_one_line(sft_run, guesser, tasks, tmp_path):
    sft = sft_run[0]
    (tmp_path / "full" / "checkpoint").mkdir(parents=True)
    for file in guesser.iterdir():
        (tmp_path / "full" / "checkpoint" / file.name).write_bytes(file.read_bytes())
    other = tiny_folder(tmp_path / "other", seed=8)
    for more, said in [
            (["--adapter", sft, "--lora-rank", 8], ["--lora-rank 8", "has 4"]),
            (["--adapter", sft, "--lora-alpha", 4], ["--lora-alpha 4", "has 8"]),
            (["--adapter", sft, "--lora-targets", "q_proj"], ["--lora-targets"]),
            (["--adapter", sft, "--lora-rank", 0], ["--lora-rank 0", "merge"]),
            (["--adapter", sft, "--optim", "adamw-sr"], ["--optim adamw-sr"]),
            (["--adapter", sft, "--model", other], ["hash", str(other)]),
            (["--adapter", tmp_path / "full"], ["--adapter", "whole model", f"--model {tmp_path}/full/checkpoint"]),
            (["--adapter", tmp_path / "full" / "checkpoint"], ["whole model"]),
            (["--adapter", "nowhere"], ["--adapter nowhere", "adapter_config.json"]),
            (["--adapter", ""], ["--adapter is empty"]),
            (["--model", sft / "checkpoint"], ["holds an adapter", f"--model {guesser} --adapter"]),
            (["--model", sft], ["a run folder", f"--model {guesser} --adapter {sft}"]),
            (["--model", tmp_path / "full"], ["a run folder", f"--model {tmp_path}/full/checkpoint"]),
            (["--lora-alpha", 4], ["--lora-alpha is read only with --lora-rank"]),
            (["--lora-targets", "q_proj"], ["--lora-targets is read only with --lora-rank"]),
            (["--lora-rank", 4, "--lora-targets", "head"], ["--lora-targets head", "q_proj"]),
            (["--lora-rank", -1], ["--lora-rank"]), (["--lora-rank", 4, "--lora-alpha", 0], ["--lora-alpha"])]:
        refused(run(*grpo(guesser, tasks, tmp_path / "run", *more)), *said)
        assert not (tmp_path / "run").exists() and not (tmp_path / "labbook.md").exists(), more
    refused(run("train_grpo.py", "--lora-rank", 16, "--labbook", tmp_path / "labbook.md"), "--lr", "adapter", "1e-4")
    refused(run("eval_passk.py", "--model", guesser, "--adapter", "nowhere", "--tasks-dir", tasks), "--adapter nowhere")
    refused(run("pretrain.py", "--data", "x", "--lora-rank", 4), "--lora-rank")


def test_a_changed_adapter_is_refused_at_a_resume(sft_run, guesser, tasks, tmp_path):
    adapter = tmp_path / "a"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes((sft_run[0] / "checkpoint" / name).read_bytes())
    done(*grpo(guesser, tasks, tmp_path / "run", "--adapter", adapter, "--max-steps", 1))
    (adapter / "adapter_model.safetensors").write_bytes(adapter_bytes(tmp_path / "run"))
    refused(run("train_grpo.py", "--resume", tmp_path / "run", "--max-steps", 2, "--labbook", tmp_path / "labbook.md"),
            "the model has changed")


def test_the_preset_of_the_documents_trains_an_adapter():
    import train_grpo
    args = train_grpo.get_args(["--preset", "qwen3-1.7b"])
    assert args.lora_rank == 16 and args.lora_alpha is None and args.lr == 1e-5
    assert train_grpo.get_args(["--preset", "qwen3-1.7b", "--lora-rank", "0"]).lora_rank == 0


@pytest.mark.slow
def test_the_whole_way_on_the_embedded_base(tmp_path):
    """SFT with an adapter, GRPO from it with a KL term, an evaluation of each, all on data/tiny."""
    rows = write_rows(tmp_path / "sft.jsonl", [{"prompt": [{"role": "user", "content": f"What is {i} + 1? End with "
                                               "#### and the answer."}], "completion": [
        {"role": "assistant", "content": f"{i} + 1 = {i + 1}\n#### {i + 1}"}]} for i in range(64)])
    common_flags = ["--lr", "1e-3", "--eval-n", 0, "--labbook", tmp_path / "labbook.md", "--device", "cpu"]
    done("train_sft.py", "--data", rows, "--lora-rank", 16, "--max-steps", 4, "--rows-per-step", 16, "--output-dir",
         tmp_path / "sft", *common_flags)
    done("train_grpo.py", "--adapter", tmp_path / "sft", "--max-steps", 2, "--prompts-per-step", 2, "--max-new", 64,
         "--beta", 0.04, "--kl-estimator", "k3", "--output-dir", tmp_path / "grpo", *common_flags)
    assert abs(metrics(tmp_path / "grpo")[0]["kl"]) < 1e-6
    done("eval_passk.py", "--adapter", tmp_path / "grpo", "--n", 2, "--limit", 4, "--max-new", 64, "--device", "cpu",
         "--out", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["limit"] == 4
