"""
The engine against independent references: a fresh full forward for log-probs, transformers for greedy tokens, and hand
arithmetic for the sampler. Alignment of ids, mask and log-probs is checked after every way in which a row can end or go
on. All models are random and tiny.
"""
import copy

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import engine as engine_module
from common import RunError, UserError
from engine import Engine, sample_tokens, uniform
from model import llama_config, load_model, new_model, save_model

torch.set_num_threads(1)
V = 61


def tiny(seed=0, vocab=V, kv_heads=2, layers=2, context=256, scale=8.0, **more):
    """Random weights, scaled up so that the distributions are far from uniform."""
    raw = llama_config(vocab, 32, layers, 4, kv_heads, 48, context=context, eos=more.pop("eos", 1))
    model = new_model({**raw, **more}, seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(scale)
    return model


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23]]


def full_logits(model, ids):
    """(T,) ids -> (T, V) fp64 logits of a plain forward pass without a cache."""
    with torch.no_grad():
        return (model(ids, [len(ids)]).float() @ model.head_weight.float().t()).double()


def check_rows(model, prompts, n, r, temperature=1.0, tolerance=1e-4):
    """Everything that must hold for any rollout: alignment, padding, and log-probs that a fresh forward repeats."""
    b, t = r.ids.shape
    assert b == len(prompts) * n and r.mask.shape == (b, t) and r.logp.shape == (b, t - 1)
    assert r.ids.dtype == torch.int64 and r.mask.dtype == torch.bool and int(r.length.max()) == t
    assert (r.logp[~r.mask[:, 1:]] == 0).all()
    for i in range(b):
        p, length = prompts[i // n], int(r.length[i])
        assert int(r.prompt_length[i]) == len(p) and r.ids[i, :len(p)].tolist() == list(p)
        assert not r.mask[i, :len(p)].any() and not r.mask[i, length:].any() and not r.ids[i, length:].any()
        want = torch.log_softmax(full_logits(model, r.ids[i, :length]) / temperature, -1)
        want = want[:-1].gather(1, r.ids[i, 1:length, None])[:, 0]
        at = r.mask[i, 1:length]
        assert torch.allclose(r.logp[i, :length - 1][at].double(), want[at], atol=tolerance)
        if r.entropy is not None:
            lp = torch.log_softmax(full_logits(model, r.ids[i, :length]) / temperature, -1)[:-1]
            assert torch.allclose(r.entropy[i, :length - 1][at].double(), -(lp.exp() * lp).sum(-1)[at], atol=tolerance)
        assert r.finish[i] in ("eos", "stop", "length")


def rows(r):
    return [r.ids[i, :r.length[i]].tolist() for i in range(len(r.length))]


# ----------------------------------------------------------------------------------------------------------------------
# Log-probs and tokens against references

@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_recorded_log_probs_equal_a_fresh_forward(kv_heads, temperature):
    model = tiny(kv_heads=kv_heads)
    r = Engine(model, slots=5).generate(PROMPTS, 3, max_new=21, temperature=temperature, seed=3, entropy=True)
    check_rows(model, PROMPTS, 3, r, temperature)
    assert r.stats["tokens_sampled"] == int(r.mask.sum()) and r.stats["prompt_tokens"] == 3 * sum(map(len, PROMPTS))


def hf_config(kind, **more):
    return kind(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=256, eos_token_id=1, bos_token_id=None, pad_token_id=1,
                initializer_range=0.3, **more)


@pytest.mark.parametrize("config, kind", [
    (hf_config(LlamaConfig), LlamaForCausalLM), (hf_config(Qwen2Config, tie_word_embeddings=True), Qwen2ForCausalLM),
    (hf_config(Qwen3Config, head_dim=16), Qwen3ForCausalLM)], ids=["llama", "qwen2", "qwen3"])
def test_same_greedy_tokens_as_transformers(tmp_path, config, kind):
    torch.manual_seed(0)
    theirs = kind(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():   # transformers starts biases at 0 and norms at 1: test them too
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.2)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    r = Engine(model, slots=3).generate(PROMPTS, max_new=24, greedy=True)
    check_rows(model, PROMPTS, 1, r)
    for prompt, row in zip(PROMPTS, rows(r)):
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert row == want[0].tolist()


def test_bf16_compute_follows_the_trainers_numbers():
    model = tiny()
    model.compute_dtype = torch.bfloat16
    r = Engine(model).generate(PROMPTS, 4, max_new=30, eos_ids=())
    gaps = []
    for i in range(16):
        n = int(r.length[i])
        lp = torch.log_softmax(full_logits(model, r.ids[i, :n]), -1)[:-1].gather(1, r.ids[i, 1:n, None])[:, 0]
        gaps.append((lp - r.logp[i, :n - 1])[r.mask[i, 1:n]])
    gaps = torch.cat(gaps)
    assert gaps.abs().mean() < 0.02 and abs(gaps.exp().mean() - 1) < 0.01


def test_two_token_model_by_hand():
    """
    No layers, V = 2, C = 2, embedding rows (3, 4) and (1, 0): rmsnorm gives sqrt(2) * (.6, .8) and sqrt(2) * (1, 0), so
    after token 0 the logits are sqrt(2) * (5, .6), after token 1 sqrt(2) * (3, 1).
    """
    model = new_model({**llama_config(2, 2, 1, 1, 1, 2), "rms_norm_eps": 0.0}, 0)
    with torch.no_grad():
        for p in model.model.layers.parameters():
            p.zero_()   # a layer of zeros adds nothing to the residual stream
        model.model.embed_tokens.weight.copy_(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    for temperature in (1.0, 2.0):
        r = Engine(model).generate([[1]], 40, max_new=3, temperature=temperature, seed=1)
        z = 2 ** 0.5 / temperature * np.array([[5.0, 0.6], [3.0, 1.0]])
        logp = z - np.log(np.exp(z).sum(1, keepdims=True))
        assert len({tuple(x) for x in rows(r)}) > 1
        for ids, got in zip(r.ids, r.logp):
            assert np.allclose(got, [logp[ids[t], ids[t + 1]] for t in range(3)], atol=1e-5)


def test_sampler_is_an_inverse_cdf():
    p = torch.tensor([[0.1, 0.0, 0.4, 0.5]]).repeat(6, 1)
    u = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 1 - 2.0 ** -24])
    token, logp, ent = sample_tokens(p.log(), u, entropy=True)
    assert token.tolist() == [0, 0, 2, 2, 3, 3]   # never token 1, whose probability is 0
    assert torch.allclose(logp, p[0, token].log()) and torch.allclose(ent, torch.full((6,), 0.943348), atol=1e-5)
    token, logp, _ = sample_tokens(p.log(), u, temperature=0.5, greedy=True)
    assert token.tolist() == [3] * 6 and torch.allclose(logp, torch.tensor(0.5).log().expand(6))   # temperature 1


def test_samples_follow_the_distribution():
    """Frequencies of 4,000 first tokens against the model's own probabilities, chi-square."""
    model, n = tiny(scale=4.0), 4000
    p = torch.softmax(full_logits(model, torch.tensor(PROMPTS[0]))[-1] / 1.3, -1)
    r = Engine(model, slots=500).generate(PROMPTS[:1], n, max_new=1, temperature=1.3, seed=11)
    count = torch.bincount(r.ids[:, 3], minlength=V)
    keep = p * n > 5
    chi = ((count - p * n) ** 2 / (p * n))[keep].sum()
    df = int(keep.sum()) - 1
    assert df > 5 and chi < df + 4 * (2 * df) ** 0.5


# ----------------------------------------------------------------------------------------------------------------------
# Independence of the batch

def test_samples_do_not_depend_on_what_runs_beside_them():
    model = tiny(eos=2)
    args = dict(max_new=25, seed=5, step=2)
    whole = rows(Engine(model, slots=64).generate(PROMPTS, 4, prompt_ids=[40, 41, 42, 43], **args))
    assert len(set(map(tuple, whole[:4]))) == 4                             # samples of a prompt differ
    for slots in (1, 3, 7):                                                 # refill, and prompts that share a slot
        assert rows(Engine(model, slots=slots).generate(PROMPTS, 4, prompt_ids=[40, 41, 42, 43], **args)) == whole
    lazy = Engine(model, slots=7)
    lazy.refill = 4                                                         # as on a GPU: slots stay idle for a while
    assert rows(lazy.generate(PROMPTS, 4, prompt_ids=[40, 41, 42, 43], **args)) == whole
    one = Engine(model, slots=5)
    assert rows(one.generate([PROMPTS[2]], 4, prompt_ids=[42], **args)) == whole[8:12]
    mixed = [PROMPTS[3], [30] * 40, PROMPTS[0]]
    assert rows(one.generate(mixed, 4, prompt_ids=[43, 7, 40], **args))[8:] == whole[:4]
    assert rows(one.generate(mixed, 2, prompt_ids=[43, 7, 40], **args))[4:] == whole[:2]
    assert rows(one.generate(PROMPTS, 4, prompt_ids=[40, 41, 42, 43], max_new=25, seed=5, step=3)) != whole
    assert rows(one.generate(PROMPTS, 4, prompt_ids=[40, 41, 42, 43], max_new=25, seed=6, step=2)) != whole
    assert rows(one.generate(PROMPTS, 4, prompt_ids=[50, 41, 42, 43], **args))[4:] == whole[4:]


def test_two_passes_are_bit_equal_and_batches_agree():
    model = tiny()
    e = Engine(model, slots=4)
    a, b = (e.generate(PROMPTS, 2, max_new=20, seed=1) for _ in range(2))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.logp, b.logp)
    for i, prompt in enumerate(PROMPTS):
        alone = e.generate([prompt], 2, max_new=20, seed=1, prompt_ids=[i])
        for j in range(2):
            n = int(alone.length[j])
            assert torch.allclose(alone.logp[j, :n - 1], a.logp[2 * i + j, :n - 1], atol=1e-5)


def test_hash_is_uniform_and_independent():
    shape = (7, 6, 8, 8, 40)   # seed, step, prompt, sample, position: 107,520 numbers
    axes = torch.meshgrid(*(torch.arange(k) for k in shape), indexing="ij")
    u = uniform(*axes)
    assert u.dtype == torch.float32 and u.shape == shape and 0 <= u.min() and u.max() < 1
    assert len(u.flatten().unique()) > 0.995 * u.numel()   # 24 bits: a few coincidences are due
    count = torch.histc(u, 64, 0, 1)
    chi = ((count - u.numel() / 64) ** 2 / (u.numel() / 64)).sum()
    assert chi < 63 + 5 * (2 * 63) ** 0.5
    for axis in range(5):
        a, b = u.narrow(axis, 0, shape[axis] - 1).flatten(), u.narrow(axis, 1, shape[axis] - 1).flatten()
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 5 / len(a) ** 0.5
        pairs = torch.bincount((a * 8).long() * 8 + (b * 8).long(), minlength=64)   # neighbours jointly uniform
        assert ((pairs - len(a) / 64) ** 2 / (len(a) / 64)).sum() < 63 + 5 * (2 * 63) ** 0.5
        mean = u.mean(dim=[d for d in range(5) if d != axis])
        assert (mean - 0.5).abs().max() < 5 * (shape[axis] / u.numel() / 12) ** 0.5
    one = uniform(3, 2, 1, 5, 17)
    assert one == u[3, 2, 1, 5, 17] and uniform(2, 3, 1, 5, 17) != one   # ints as well; the order of numbers counts
    assert uniform(0, 0, 2 ** 32 - 1, 0, torch.tensor([0, 1])).shape == (2,)


# ----------------------------------------------------------------------------------------------------------------------
# Ends: eos, several eos ids, pad == eos, length

def test_every_eos_id_ends_a_row_and_stays_in_it():
    model = tiny(eos=[2, 3, 4], pad_token_id=2)   # pad == eos, and the padding of `ids` is 0, another token's id
    r = Engine(model, slots=6).generate(PROMPTS, 16, max_new=30, seed=2, temperature=1.5)
    check_rows(model, PROMPTS, 16, r, 1.5)
    last = [x[-1] for x in rows(r)]
    ended = {t for t, f in zip(last, r.finish) if f == "eos"}
    assert ended == {2, 3, 4} and "length" in r.finish
    for i, row in enumerate(rows(r)):
        new = row[len(PROMPTS[i // 16]):]
        assert not {2, 3, 4} & set(new[:-1])
        assert r.mask[i].sum() == len(new)   # built from lengths: 1 up to and including the eos
        assert (r.finish[i] == "eos") == (new[-1] in (2, 3, 4))
        assert r.finish[i] == "eos" or len(new) == 30
    free = Engine(model).generate(PROMPTS, 16, max_new=30, seed=2, temperature=1.5, eos_ids=())
    assert set(free.finish) == {"length"} and (free.mask.sum(1) == 30).all()
    for a, b in zip(rows(r), rows(free)):
        assert b[:len(a)] == a
    assert set(Engine(model).generate([[4, 2]], 1, max_new=2).finish) <= {"eos", "length"}   # eos in a prompt: a token


def test_max_new_may_differ_by_row():
    model = tiny()
    e, limits = Engine(model, slots=3), [1, 9, 4, 17, 2, 2, 30, 5]
    r = e.generate(PROMPTS, 2, max_new=limits, seed=1, eos_ids=())
    check_rows(model, PROMPTS, 2, r)
    whole = e.generate(PROMPTS, 2, max_new=30, seed=1, eos_ids=())
    assert r.mask.sum(1).tolist() == limits
    assert all(b[:len(a)] == a for a, b in zip(rows(r), rows(whole)))


def test_errors_name_the_numbers():
    e = Engine(tiny(context=64))
    with pytest.raises(UserError, match="prompt 1 has 60 tokens.*max_new 5.*65.*64"):
        e.generate([[5], [5] * 60], max_new=5)
    assert int(e.generate([[5] * 60], max_new=4, eos_ids=()).length) == 64   # exactly full is fine
    for prompts, more, match in (
            ([], {}, "no prompts"), ([[]], {}, "prompt 0 is empty"), ([[V]], {}, "61"), ([[-1]], {}, "-1"),
            ([[1]], {"temperature": 0.0}, "0.0"), ([[1]], {"max_new": 0}, "0"), ([[1]], {"stop": ["x"]}, "tokenizer"),
            ([[1]], {"prompt_ids": [1, 2]}, "2 prompt_ids")):
        with pytest.raises(UserError, match=match):
            e.generate(prompts, **{"max_new": 4, **more})


def test_weights_that_are_not_finite_stop_the_call_and_leave_no_trace():
    model = tiny()
    e = Engine(model)
    want = rows(e.generate(PROMPTS, 2, max_new=9))
    keep = model.model.norm.weight.clone()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(RunError, match="not finite"):
        e.generate(PROMPTS, 2, max_new=9)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = tiny().model.layers[0].mlp.down_proj.weight[0, 0]
    assert torch.equal(keep, model.model.norm.weight) and rows(e.generate(PROMPTS, 2, max_new=9)) == want


# ----------------------------------------------------------------------------------------------------------------------
# Stop strings and injected text

def byte_tokenizer():
    """Byte-level, with a few merged tokens that hold a stop string's border inside."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<eos>", *"abcdefgh#=<>/", "##", "a#", "#b", "#b#", "cd", "=>", "x=>y", "Ċ", "Ġa", "Ã", "©", "aÃ", "Ã©"]
    pieces += [c for c in alphabet if c not in pieces][:V - len(pieces)]
    t = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<eos>"))
    t.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>")


TOK = byte_tokenizer()


def decode(ids):
    return TOK.decode(ids, skip_special_tokens=False)


def first_stop(new, stop):
    """By definition: the smallest number of tokens whose text holds a stop string."""
    return next((k for k in range(1, len(new) + 1) if any(s in decode(new[:k]) for s in stop)), None)


@pytest.mark.parametrize("stop", [["##"], ["#b", "=>"], ["a", "\n"], ["d#"], ["é"], [" "]])
def test_stop_strings_cut_at_the_token_that_completes_them(stop):
    model = tiny(scale=5.0, eos=0)
    e = Engine(model, TOK, slots=7)
    free = e.generate(PROMPTS, 12, max_new=30, temperature=1.4, seed=9)
    r = e.generate(PROMPTS, 12, max_new=30, temperature=1.4, seed=9, stop=stop)
    check_rows(model, PROMPTS, 12, r, 1.4)
    hits = 0
    for i, (a, b) in enumerate(zip(rows(free), rows(r))):
        p = len(PROMPTS[i // 12])
        body = a[p:-1] if free.finish[i] == "eos" else a[p:]   # an eos ends a row; it is no text
        k = first_stop(body, stop)
        assert b == (a if k is None else a[:p + k])
        assert r.finish[i] == (free.finish[i] if k is None else "stop")
        hits += k is not None
    assert hits > 0


def test_on_stop_sees_the_text_with_the_stop_and_injected_tokens_are_not_trained_on():
    model, seen = tiny(scale=5.0, eos=0), {}
    result = [7, 8, 14, 9]   # holds "##" itself: injected text must not stop the row

    def on_stop(row, text, stop):
        seen.setdefault(row, []).append((text, stop))
        return result if len(seen[row]) < 3 else None

    e = Engine(model, TOK, slots=6)
    r = e.generate(PROMPTS, 8, max_new=40, temperature=1.4, seed=4, stop=["#", "a"], on_stop=on_stop, entropy=True)
    check_rows(model, PROMPTS, 8, r, 1.4)
    assert max(map(len, seen.values())) == 3 and "stop" in r.finish
    for row, calls in seen.items():
        ids, p = r.ids[row, :r.length[row]].tolist(), int(r.prompt_length[row])
        for text, stop in calls:
            assert stop in text
            k = next(k for k in range(1, 99) if any(s in decode(ids[p:p + k]) for s in ("#", "a")))
            assert decode(ids[p:p + k]) == text                       # the stop's own tokens are in ids and text,
            assert r.mask[row, p:p + k].all() and (r.logp[row, p - 1:p + k - 1] < 0).all()   # scored once
            p += k
            if ids[p:p + 4] == result and len(calls) > 1:
                assert not r.mask[row, p:p + 4].any() and not r.logp[row, p - 1:p + 3].any()
                p += 4
    # the model reads what was injected: other text, another continuation
    first = {k: v[0] for k, v in seen.items()}
    seen.clear()
    result = [30, 31, 32, 33]
    q = e.generate(PROMPTS, 8, max_new=40, temperature=1.4, seed=4, stop=["#", "a"], on_stop=on_stop)
    assert {k: v[0] for k, v in seen.items()} == first
    row = max(seen, key=lambda k: len(seen[k]))
    p = int(r.prompt_length[row])
    k = next(k for k in range(1, 99) if any(s in decode(r.ids[row, p:p + k].tolist()) for s in ("#", "a"))) + p + 4
    assert torch.equal(r.ids[row, :k - 4], q.ids[row, :k - 4]) and r.logp[row, k - 1] != q.logp[row, k - 1]


def test_truncation_at_every_position_keeps_everything_aligned():
    """max_new and the context cut a row before, inside and after stop and injection."""
    model = tiny(scale=5.0, eos=0, context=40)

    def on_stop(row, text, stop):
        return [7, 8, 14] if row % 3 else [] if len(text) % 2 else None

    whole = None
    for max_new in range(27, 0, -1):
        r = Engine(model, TOK, slots=5).generate(PROMPTS, 3, max_new=max_new, temperature=1.4, seed=4,
                                                 stop=["#", "a", "="], on_stop=on_stop)
        check_rows(model, PROMPTS, 3, r, 1.4)
        assert r.mask.sum(1).max() <= max_new and int(r.length.max()) <= 40
        assert (r.length == r.prompt_length + r.mask.sum(1) + sum_injected(r)).all()
        if whole is None:
            whole = rows(r)
            assert sum_injected(r).sum() == r.stats["injected_tokens"] > 10
        for i, (a, b) in enumerate(zip(whole, rows(r))):
            assert a[:len(b)] == b
            if r.finish[i] == "length":
                assert int(r.mask[i].sum()) == max_new or int(r.length[i]) > 36


def sum_injected(r):
    inside = torch.arange(r.ids.shape[1]) < r.length[:, None]
    return (inside & ~r.mask).sum(1) - r.prompt_length


def test_injected_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="61"):
        Engine(tiny(scale=5.0), TOK).generate(PROMPTS, 8, max_new=40, stop=["a", "#"], on_stop=lambda *_: [3, V])


def test_a_cache_that_grows_under_injection():
    model = tiny(scale=5.0, eos=0, context=1024)
    r = Engine(model, TOK, slots=3, context=700).generate(PROMPTS, 2, max_new=12, temperature=1.4, seed=4,
                                                          stop=["#", "a", "="], on_stop=lambda *_: [9] * 100)
    check_rows(model, PROMPTS, 2, r, 1.4)
    assert 300 < int(r.length.max()) <= 700


# ----------------------------------------------------------------------------------------------------------------------
# Weights: the engine samples from what the trainer has now

def train_step(model, lr=0.5):
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    hidden = model(torch.arange(5, 25), [20])
    (hidden.float() @ model.head_weight.float().t()).log_softmax(-1)[:, 7].sum().mul(-1 / 20).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("params, compute", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                             (torch.bfloat16, torch.bfloat16)], ids=["fp32", "master", "bf16"])
def test_a_weight_update_is_seen_at_the_next_call(params, compute):
    model = tiny(scale=3.0).to(params)
    model.compute_dtype = compute
    e = Engine(model)
    before = e.generate(PROMPTS, max_new=12, greedy=True, eos_ids=())
    train_step(model)
    after = e.generate(PROMPTS, max_new=12, greedy=True, eos_ids=())
    assert (before.logp[:, 8] - after.logp[:, 8]).abs().max() > 0.01   # the same prompt, no stale keys and values
    check_rows(model, PROMPTS, 1, after, tolerance=1e-4 if compute == torch.float32 else 0.1)
    fresh = Engine(copy.deepcopy(model)).generate(PROMPTS, max_new=12, greedy=True, eos_ids=())
    assert torch.equal(fresh.ids, after.ids) and torch.equal(fresh.logp, after.logp)


def test_weights_are_shared_and_stay_so():
    model = tiny()
    names = [n for n, _ in model.named_parameters()]
    e = Engine(model)
    a = model.model.layers[0].self_attn
    assert e.layers[0].qkv[0].data_ptr() == a.q_proj.weight.data_ptr()
    assert e.layers[0].qkv[0].untyped_storage().data_ptr() == a.v_proj.weight.untyped_storage().data_ptr()
    second = Engine(model)   # finds them fused and takes the same storage
    assert second.layers[0].qkv[0].data_ptr() == e.layers[0].qkv[0].data_ptr()
    # someone gives the parameters new storage: values move into ours, and the next in-place update is seen again
    other = tiny(seed=1)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert rows(e.generate(PROMPTS, max_new=9)) == rows(Engine(other).generate(PROMPTS, max_new=9))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.data = torch.zeros(16, 32)
        other.model.layers[0].self_attn.k_proj.weight.zero_()
    for engine in (e, second, e):
        assert rows(engine.generate(PROMPTS, max_new=9)) == rows(Engine(other).generate(PROMPTS, max_new=9))
    assert [n for n, _ in model.named_parameters()] == names
    model.compute_dtype = torch.bfloat16   # a change of precision is followed too
    assert e.generate(PROMPTS, max_new=9).logp.isfinite().all() and e.kv.dtype == torch.bfloat16


def test_a_parameter_that_the_engine_does_not_know_is_refused():
    model = tiny()
    model.model.layers[1].mlp.up_proj.register_parameter("extra", torch.nn.Parameter(torch.zeros(2, 32)))
    with pytest.raises(TypeError, match="extra"):
        Engine(model)


def test_a_fused_model_saves_and_loads(tmp_path):
    model = tiny()
    want = rows(Engine(model).generate(PROMPTS, max_new=9, greedy=True))
    save_model(model, tmp_path / "m")
    assert rows(Engine(load_model(tmp_path / "m")).generate(PROMPTS, max_new=9, greedy=True)) == want


def test_long_prompts_are_packed_in_pieces(monkeypatch):
    model = tiny()
    prompts = [[5 + i % 50] * (10 + 7 * i) for i in range(9)]
    whole = Engine(model).generate(prompts, 2, max_new=6)
    monkeypatch.setattr(engine_module, "EXTEND_TOKENS", 40)
    pieces = Engine(model).generate(prompts, 2, max_new=6)
    assert torch.equal(whole.ids, pieces.ids) and torch.allclose(whole.logp, pieces.logp, atol=1e-5)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("case", ["length", "skewed", "eos", "stop", "inject", "grow"])
def test_a_host_that_looks_late_gets_the_same_samples(ahead, case, monkeypatch):
    """Chunks that run while an earlier one is read, as on a GPU: with refill, idle slots and compaction."""
    model = tiny(scale=5.0, eos=[0, 3, 4] if case in ("eos", "skewed") else 0, context=1024)
    more = {"stop": ["#", "a"]} if case in ("stop", "inject", "grow") else {}
    limit = 30 if case != "skewed" else [3 if b % 2 else 30 for b in range(48)]

    def run(ahead):
        calls = {}

        def on_stop(row, text, stop):
            calls[row] = calls.get(row, 0) + 1
            return [[7, 8, 14, 9] * (8 if case == "grow" else 1), [], [5], None][min(3, (calls[row] + row) % 5)]
        e = Engine(model, TOK, slots=11, context=300)
        e.ahead, e.refill = ahead, 3
        return e.generate(PROMPTS, 12, max_new=limit, temperature=1.4, seed=4, entropy=True,
                          eos_ids=() if case == "length" else None, **more,
                          on_stop=on_stop if case in ("inject", "grow") else None)
    monkeypatch.setattr(Engine, "bucket", lambda self, rows: next(b for b in (2, 4, 8, 11) if b >= rows))
    want, got = run(0), run(ahead)
    check_rows(model, PROMPTS, 12, got, 1.4)
    assert rows(got) == rows(want) and got.finish == want.finish and torch.equal(got.mask, want.mask)
    assert torch.allclose(got.logp, want.logp, atol=1e-5) and torch.allclose(got.entropy, want.entropy, atol=1e-4)
    for key in ("tokens_sampled", "prompt_tokens", "injected_tokens"):
        assert got.stats[key] == want.stats[key]
    if case == "length":   # the host knows when rows will end: no step is run for nothing
        assert got.stats["steps"] == want.stats["steps"]
    else:
        assert len(set(want.finish)) > 1


def test_progress_counts_rows_and_tokens():
    calls = []
    r = Engine(tiny(), slots=3).generate(PROMPTS, 2, max_new=10, progress=lambda *a: calls.append(a))
    assert calls[-1] == (8, 8, r.stats["tokens_sampled"]) and calls == sorted(calls)
