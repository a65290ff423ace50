"""
The mathematics of train_grpo.py against numbers worked by hand, closed forms and Monte Carlo; then what its flags do to
a run of a tiny model. Nothing here looks at how the script is written: it calls its functions and reads its files.
"""
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import EOS, problem, tiny_model, write_rows
from launch import jsonl, metrics, run, weights

import common
import train_grpo as grpo
from model import load_model
from train_grpo import Places, group_advantage, grpo_loss, grpo_loss_exact, kl_terms, policy_loss, token_weights

torch.set_num_threads(1)
T = torch.tensor


def settings(**more):
    return SimpleNamespace(**{"eps": 0.2, "beta": 0.0, "kl_estimator": "k2", "lam": 0.5, "max_new": 100, **more})


def answers(right, length=None, grades=None):
    """What a reward function sees of a step's answers. right, length (N, G)."""
    return SimpleNamespace(right=right, length=length, grades=grades)


def gradient(fn, *inputs):
    """The gradient of fn(*inputs) with respect to the first input."""
    x = inputs[0].clone().requires_grad_()
    return torch.autograd.grad(fn(x, *inputs[1:]), x)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Rewards and advantages

def test_advantage_by_hand():
    """Rewards 1 0 0 0: mean 1/4, std sqrt(3)/4. Rewards 1 1 0 0: mean 1/2, std 1/2."""
    reward = T([[1.0, 0, 0, 0], [1, 1, 0, 0]])
    want = T([[3, -1, -1, -1], [3 ** 0.5, 3 ** 0.5, -3 ** 0.5, -3 ** 0.5]]) / 3 ** 0.5
    before = reward.clone()
    assert torch.allclose(group_advantage(reward), want, atol=1e-6)
    assert torch.equal(reward, before)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.35, 0.1, 1e6, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_group_without_spread_has_advantage_exactly_0(value, size):
    """Though the mean of equal floats is often a little off, which a division by a tiny std would blow up."""
    assert (group_advantage(torch.full((2, size), value)) == 0).all()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_seven_of_eight_is_bounded(scale):
    """The odd one out of G has the largest advantage there is, sqrt(G - 1)."""
    reward = torch.ones(1, 8) * scale
    reward[0, 3] = 0
    adv = group_advantage(reward)
    assert torch.isfinite(adv).all()
    assert adv[0, 3].item() == pytest.approx(-math.sqrt(7), rel=1e-5)
    assert adv.abs().max() <= math.sqrt(7) * (1 + 1e-5)
    assert adv.sum().abs() < 1e-5


def test_a_group_does_not_see_its_neighbours():
    reward = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    adv = group_advantage(reward)
    for i in range(5):
        assert torch.equal(adv[i:i + 1], group_advantage(reward[i:i + 1]))
    assert torch.allclose(adv, (reward - reward.mean(1, keepdim=True)) / reward.std(1, correction=0, keepdim=True),
                          atol=1e-5)


@pytest.mark.parametrize("lam", [0.01, 0.2, 0.5, 0.99])
def test_length_penalty_orders_right_answers_and_never_lifts_a_wrong_one(lam):
    length = torch.arange(1, 101)[None]
    args = settings(lam=lam, max_new=100)
    right = grpo.reward_short(answers(torch.ones_like(length, dtype=torch.bool), length), args, None)
    wrong = grpo.reward_short(answers(torch.zeros_like(length, dtype=torch.bool), length), args, None)
    assert (right[0, :-1] > right[0, 1:]).all()
    assert (wrong == 0).all() and right.min() > wrong.max()


def test_length_penalty_by_hand():
    right, length = T([[True, True, False, True]]), T([[10, 50, 20, 100]])
    got = grpo.reward_short(answers(right, length), settings(lam=0.5), None)
    assert torch.allclose(got, T([[0.95, 0.75, 0.0, 0.5]]))


def test_lam_0_is_grpo():
    played = answers(torch.rand(6, 8, generator=torch.Generator().manual_seed(1)) > 0.5, torch.randint(1, 100, (6, 8)))
    assert torch.equal(grpo.reward_short(played, settings(lam=0.0), None), grpo.reward_right(played, None, None))


def test_all_right_group_hides_the_strength_of_the_penalty():
    """r = 1 - lam L: dividing by the std cancels lam. With a wrong answer in the group it does not."""
    length = T([[10, 20, 40, 80]])
    right = torch.ones(1, 4, dtype=torch.bool)

    def advantage(lam, right):
        return group_advantage(grpo.reward_short(answers(right, length), settings(lam=lam), None))
    weak, strong = advantage(0.2, right), advantage(0.5, right)
    assert weak.abs().max() > 0.5
    assert torch.allclose(weak, strong, atol=1e-4)
    right = T([[True, True, True, False]])
    assert not torch.allclose(advantage(0.2, right), advantage(0.5, right), atol=1e-2)


def test_dr_grpo_by_hand():
    """No division by the std: rewards 1 0 0 0 give 3/4 and -1/4, and an easy group weighs no more than a mixed one."""
    _, advantage, norm = grpo.ARMS["dr_grpo"]
    assert torch.equal(advantage(T([[1.0, 0, 0, 0], [1, 1, 1, 1]])), T([[0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0]]))
    assert (advantage(torch.full((2, 7), 0.1)) == 0).all()
    # a sum over tokens: the weight of a token is the same in a long and in a short answer
    weight = token_weights(norm, T([2, 50]), 100)
    assert torch.allclose(weight, torch.full((2,), 1 / 200))


# ----------------------------------------------------------------------------------------------------------------------
# Controls

def rng(step=0):
    return np.random.default_rng([0, step, 1])


def test_random_reward_is_a_fair_coin_that_does_not_look_at_the_answers():
    right = torch.zeros(100, 8, dtype=torch.bool)
    coin = grpo.reward_random(answers(right), None, rng())
    assert set(coin.flatten().tolist()) == {0.0, 1.0} and abs(coin.mean().item() - 0.5) < 4 * 0.5 / 800 ** 0.5
    assert torch.equal(coin, grpo.reward_random(answers(~right), None, rng()))
    assert not torch.equal(coin, grpo.reward_random(answers(right), None, rng(step=1)))


def test_permuted_reward_deals_the_rewards_of_the_step():
    """As many ones as were right, in other places, so that groups without spread get some."""
    right = torch.zeros(8, 8, dtype=torch.bool)
    right[:2], right[2, :3] = True, True
    before = right.clone()
    dealt = grpo.reward_permuted(answers(right), None, rng())
    assert dealt.sum() == 19 and dealt.shape == (8, 8) and torch.equal(right, before)
    assert not torch.equal(dealt, right.float())
    assert torch.equal(dealt, grpo.reward_permuted(answers(right), None, rng()))
    many = torch.stack([grpo.reward_permuted(answers(right), None, rng(s)) for s in range(400)]).mean(0)
    assert (many - 19 / 64).abs().max() < 5 * 0.46 / 400 ** 0.5   # no place is favoured


def test_format_only_pays_what_can_be_read():
    grades = [{"answer": a, "right": r} for a, r in [("3", True), ("4", False), (None, False), ("0", False)]]
    got = grpo.reward_format(answers(T([[True, False], [False, False]]), grades=grades), None, None)
    assert torch.equal(got, T([[1.0, 1.0], [0.0, 1.0]]))


# ----------------------------------------------------------------------------------------------------------------------
# The surrogate and its normalisation

# adv, ratio -> value of the summand, whether clipped, d summand / d logp; eps 0.2
CLIP = [(1.0, 1.5, 1.2, True, 0.0), (1.0, 0.5, 0.5, False, 0.5), (-1.0, 1.5, -1.5, False, -1.5),
        (-1.0, 0.5, -0.8, True, 0.0), (2.0, 1.1, 2.2, False, 2.2), (-2.0, 0.9, -1.8, False, -1.8)]


@pytest.mark.parametrize("adv, ratio, value, clipped, slope", CLIP)
def test_clipping_by_hand(adv, ratio, value, clipped, slope):
    logp, old, weight = T([math.log(ratio) - 1.0]), T([-1.0]), T([0.25])
    loss, took = policy_loss(logp, old, T([adv]), weight, 0.2)
    assert loss.item() == pytest.approx(-0.25 * value, rel=1e-5)
    assert took.tolist() == [clipped]
    got = gradient(lambda x: policy_loss(x, old, T([adv]), weight, 0.2)[0], logp)
    assert got.item() == pytest.approx(-0.25 * slope, rel=1e-5)


def places(norm, lengths, adv, max_new):
    """Answers of some lengths as flat places: adv and weight (P,)."""
    length = T(lengths)
    return (torch.repeat_interleave(T(adv), length),
            torch.repeat_interleave(token_weights(norm, length, max_new), length))


@pytest.mark.parametrize("norm, want", [
    ("sequence", -(2 * 1 + 2 * 1.1 + 2 * 1.2) / 6 + 1 / 2),        # each answer's mean, then half of both
    ("token", -(2 * 1 + 2 * 1.1 + 2 * 1.2 - 1) / 4),               # all 4 tokens alike
    ("constant", -(2 * 1 + 2 * 1.1 + 2 * 1.2 - 1) / (2 * 3))])     # two answers of at most 3 tokens
def test_losses_of_two_answers_of_three_and_one_token_by_hand(norm, want):
    """A 2 x 3 batch; advantages 2 and -1; ratios 1, 1.1, 1.2 and 1, none of them clipped with eps 0.25."""
    adv, weight = places(norm, [3, 1], [2.0, -1.0], max_new=3)
    loss, _ = policy_loss(T([1.0, 1.1, 1.2, 1.0]).log() - 2, T([-2.0] * 4), adv, weight, 0.25)
    assert loss.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("norm, total", [("sequence", 1.0), ("token", 1.0), ("constant", (5 + 1 + 3) / (3 * 8))])
def test_the_denominator_counts_what_the_numerator_sums(norm, total):
    _, weight = places(norm, [5, 1, 3], [1.0, 1.0, 1.0], max_new=8)
    assert weight.sum().item() == pytest.approx(total, rel=1e-6) and (weight > 0).all()


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
def test_weights_do_not_depend_on_the_advantages(norm):
    """Answers of groups without spread are skipped in the backward pass; they stay in the denominator."""
    both, one = token_weights(norm, T([4, 6]), 8), token_weights(norm, T([4]), 8)
    assert both[0] < one[0]


def test_arms_and_normalisations():
    assert {name: norm for name, (_, _, norm) in grpo.ARMS.items()} == {
        "grpo": "sequence", "grpo_length_penalty": "sequence", "dr_grpo": "constant", "random_reward": "sequence",
        "permuted_reward": "sequence", "format_only": "sequence"}


def test_loss_value_is_near_0_on_policy_and_its_gradient_is_not():
    adv, weight = places("sequence", [4, 4, 4, 4], group_advantage(T([[1.0, 0, 1, 0]]))[0].tolist(), 8)
    logp = torch.linspace(-3, -1, 16)
    b = Places(adv=adv, weight=weight, sampler=logp)
    loss, sums = grpo_loss(logp, slice(None), b, settings())
    slope = gradient(lambda x: grpo_loss(x, slice(None), b, settings())[0], logp)
    assert abs(loss.item()) < 1e-6 and slope.norm() > 0.1
    assert sums["clip_frac"] == 0 and sums["tokens"] == 16 and sums["mismatch"] == 0


# ----------------------------------------------------------------------------------------------------------------------
# The ratio of a whole answer (GSPO)

def test_answer_ratio_by_hand():
    """
    One answer of two tokens, ratios 1.21 and 1: geometric mean 1.1. Value -1.1 A; each token's share of the gradient is
    1.1 A / 2. One of three tokens with ratios 2, 2, 2 is clipped at 1.2 as a whole, and has no gradient.
    """
    old = T([-1.0, -2.0, -1.0, -1.0, -1.0])
    logp = old + T([1.21, 1.0, 2.0, 2.0, 2.0]).log()
    adv, weight = places("sequence", [2, 3], [1.0, 1.0], 8)
    answer = torch.repeat_interleave(T([math.log(1.1), math.log(2.0)]), T([2, 3]))
    b = Places(adv=adv, weight=weight, sampler=old, old=old, answer_log_ratio=answer)
    loss, sums = grpo_loss(logp, slice(None), b, settings())
    assert loss.item() == pytest.approx(-(1.1 + 1.2) / 2, rel=1e-5)
    assert sums["clip_frac"] == 3
    slope = gradient(lambda x: grpo_loss(x, slice(None), b, settings())[0], logp)
    assert torch.allclose(slope, T([-1.1 / 4, -1.1 / 4, 0.0, 0.0, 0.0]), atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# KL: a policy of three symbols, where everything has a closed form

THETA, REF = T([0.8, -0.2, -0.6], dtype=torch.float64), T([0.1, 0.5, -0.6], dtype=torch.float64).log_softmax(0)
PI = THETA.softmax(0)
GAP = THETA.log_softmax(0) - REF
REVERSE_KL = (PI * GAP).sum()
EXACT = PI * (GAP - REVERSE_KL)          # gradient of KL(pi || ref) with respect to the logits
FORWARD = PI - REF.exp()                 # gradient of KL(ref || pi): what k3 has on average


def monte_carlo(estimator, n=400_000):
    """Mean gradient (3,) of an estimator over n samples of the policy, and its standard error (3,)."""
    y = torch.multinomial(PI, n, replacement=True, generator=torch.Generator().manual_seed(0))
    logp = THETA.log_softmax(0)[y].requires_grad_()
    slope = torch.autograd.grad(kl_terms(estimator, logp, REF[y]).sum(), logp)[0]
    each = slope[:, None] * (torch.nn.functional.one_hot(y, 3) - PI)
    return each.mean(0), each.std(0) / math.sqrt(n)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_value_of_the_estimators(estimator):
    """k1 and k3 estimate the KL itself without bias; k2 is close to it where the policies are."""
    value = (PI * kl_terms(estimator, THETA.log_softmax(0), REF)).sum()
    assert value.item() == pytest.approx(REVERSE_KL.item(), rel=0.2 if estimator == "k2" else 1e-9)


def test_gradient_of_k2_is_that_of_the_reverse_kl():
    mean, se = monte_carlo("k2")
    assert ((mean - EXACT).abs() < 2 * se).all()


def test_gradient_of_k1_is_0_on_average():
    mean, se = monte_carlo("k1")
    assert (mean.abs() < 3 * se).all() and EXACT.abs().max() > 20 * se.max()


def test_gradient_of_k3_is_that_of_the_forward_kl_and_so_biased():
    mean, se = monte_carlo("k3")
    assert ((mean - FORWARD).abs() < 3 * se).all()
    assert ((mean - EXACT).abs() > 10 * se).any()


def test_exact_kl_has_the_exact_gradient():
    """Through the script's loss with advantage 0: whatever was sampled, the gradient is that of the reverse KL."""
    logits, ref = THETA.float()[None].repeat(4, 1), REF.float()[None].repeat(4, 1)
    b = Places(adv=torch.zeros(4), weight=torch.full((4,), 0.25), sampler=torch.zeros(4))

    def loss(z):
        return grpo_loss_exact(z, ref, T([0, 1, 2, 0]), slice(None), b, settings(beta=0.7))[0]
    got = gradient(loss, logits)
    assert torch.allclose(got, 0.7 * 0.25 * EXACT.float().expand(4, 3), atol=1e-6)
    _, sums = grpo_loss_exact(logits, ref, T([0, 1, 2, 0]), slice(None), b, settings(beta=0.7))
    assert sums["kl"].item() == pytest.approx(4 * REVERSE_KL.item(), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_weighted_like_the_loss_and_0_at_the_start(estimator):
    logp = T([-1.0, -0.5, -2.0, -1.5])
    adv, weight = places("sequence", [3, 1], [0.0, 0.0], 8)
    at_start = grpo_loss(logp, slice(None), Places(adv=adv, weight=weight, sampler=logp, ref=logp),
                         settings(beta=1.0, kl_estimator=estimator))
    assert at_start[0].item() == 0 and at_start[1]["kl"].item() == 0
    ref = logp - T([0.1, 0.2, 0.3, 0.4])
    d = [0.1, 0.2, 0.3, 0.4]
    term = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}[estimator]
    loss, _ = grpo_loss(logp, slice(None), Places(adv=adv, weight=weight, sampler=logp, ref=ref),
                        settings(beta=2.0, kl_estimator=estimator))
    assert loss.item() == pytest.approx(2.0 * ((term(d[0]) + term(d[1]) + term(d[2])) / 6 + term(d[3]) / 2), rel=1e-4)


def train_table(estimator, reward, base, beta, steps=1500, lr=1.0):
    """
    A policy that is a table of logits over one-token answers, trained on the expectation of the script's loss: every
    answer counts as often as it is sampled, so its weight is its probability.
    """
    theta = base.clone().requires_grad_()
    for _ in range(steps):
        logp = theta.log_softmax(0)
        p = logp.exp().detach()
        loss, _ = policy_loss(logp, logp.detach(), reward - (p * reward).sum(), p, 0.2)
        if estimator == "exact":
            loss = loss + beta * (logp.exp() * (logp - base)).sum()
        else:
            loss = loss + beta * (p * kl_terms(estimator, logp, base)).sum()
        theta.data -= lr * torch.autograd.grad(loss, theta)[0]
    return theta.softmax(0).detach()


@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("estimator, reaches", [("k2", True), ("exact", True), ("k1", False), ("k3", False)])
def test_table_policy_converges_to_base_times_exp_of_reward_over_beta(estimator, reaches, beta):
    """The optimum of E[r] - beta KL(pi || base) is base * exp(r / beta) / Z; k1 has no pull, and k3 another optimum."""
    base, reward = T([0.4, 0.3, 0.2, 0.1]).log(), T([0.0, 0.2, 1.0, 0.5])
    want = (base + reward / beta).softmax(0)
    got = train_table(estimator, reward, base, beta)
    assert torch.allclose(got, want, atol=2e-3) == reaches, (got, want)
    if estimator == "k1":
        assert got.max() > 0.99


# ----------------------------------------------------------------------------------------------------------------------
# The gradient of a step does not depend on how it is split (X21)

def batch_of(lengths, vocab=261, prompt=3):
    gen = torch.Generator().manual_seed(5)
    length = T(lengths) + prompt
    ids = torch.randint(5, vocab, (len(lengths), int(length.max())), generator=gen)
    at = torch.arange(ids.shape[1])
    mask = (at >= prompt) & (at < length[:, None])
    return SimpleNamespace(ids=ids, mask=mask, length=length)


def step_gradient(model, r, places_of, args, tokens, chunk, full=False):
    """What a step of the script leaves in the weights, for micro-batches of `tokens` and head chunks of `chunk`."""
    model.zero_grad(set_to_none=True)
    for group in common.micro_batches(r.length, range(len(r.length)), tokens):
        p = common.pack_rows(r.ids, r.mask, r.length, group, model.device)
        b = places_of(p)
        hidden = model(p.ids, p.lengths)[p.where]
        if full:
            shift = 0.3 * torch.linspace(-1, 1, model.head_weight.shape[0])

            def fn(z, at, p=p, b=b):
                return grpo_loss_exact(z, (z + shift).detach(), p.targets[at], at, b, args)
        else:
            def fn(logp, entropy, at, b=b):
                return grpo_loss(logp, at, b, args)
        grad, _ = common.head_backward(hidden, model.head_weight, p.targets, fn, 0.7, full=full, chunk=chunk)
        hidden.backward(grad)
    return torch.cat([q.grad.flatten() for q in model.parameters()])


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
@pytest.mark.parametrize("what", ["one update", "clipped", "answer ratio", "k3", "exact"])
def test_gradient_is_equal_for_every_split(norm, what):
    model = tiny_model(scale=4.0)
    r = batch_of([5, 1, 9, 4, 7, 2])
    adv = group_advantage(T([[1.0, 0, 0], [0, 1, 1]])).flatten()
    weight = token_weights(norm, r.mask.sum(1), 9)
    gen = torch.Generator().manual_seed(6)
    now = common.score(model, r, 0.7)[0]
    old = (now + 0.4 * torch.randn(now.shape, generator=gen)) * r.mask[:, 1:]
    answer = ((now - old).sum(1) / r.mask.sum(1))

    def places_of(p):
        return Places(adv=adv[p.row], weight=weight[p.row], sampler=common.at_places(now, p),
                      old=None if what in ("one update", "exact") else common.at_places(old, p),
                      ref=common.at_places(old, p) if what == "k3" else None,
                      answer_log_ratio=answer[p.row] if what == "answer ratio" else None)
    args = settings(beta=0.3 if what in ("k3", "exact") else 0.0, kl_estimator="k3")
    whole = step_gradient(model, r, places_of, args, 10 ** 6, 10 ** 6, what == "exact")
    assert whole.norm() > 1e-3
    for tokens, chunk in [(1, 10 ** 6), (12, 4), (20, 1), (10 ** 6, 3)]:
        part = step_gradient(model, r, places_of, args, tokens, chunk, what == "exact")
        assert (part - whole).norm() < 1e-5 * whole.norm()


def test_batch_without_trained_tokens_has_gradient_0():
    model = tiny_model()
    r = batch_of([3, 2])
    r.mask[:] = False

    def places_of(p):
        return Places(adv=torch.ones(2)[p.row], weight=torch.ones(2)[p.row], sampler=torch.zeros(len(p.row)))
    got = step_gradient(model, r, places_of, settings(), 100, 100)
    assert (got == 0).all()


def test_masked_tokens_have_no_gradient():
    """What stands in the prompt and behind an answer's end changes the gradient of no trained token's log-prob."""
    model, r = tiny_model(scale=4.0), batch_of([4, 2])
    pack = common.pack_rows(r.ids, r.mask, r.length, [0, 1], model.device)
    assert len(pack.targets) == int(r.mask.sum()) == 6
    assert pack.targets.tolist() == r.ids[r.mask].tolist()
    assert pack.row.tolist() == [0] * 4 + [1] * 2


# ----------------------------------------------------------------------------------------------------------------------
# Runs: what each flag does

def grpo_run(folder, guesser, tasks, *flags, steps=2):
    """A run of a few seconds -> its folder."""
    got = run("train_grpo.py", "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", "24",
              "--eval-n", 0, "--warmup", 0, "--prompts-per-step", 4, "--max-steps", steps,
              "--labbook", folder.parent / "labbook.md", "--output-dir", folder, *flags)
    assert got.returncode == 0, got.stderr[-2000:]
    (folder / "stdout").write_text(got.stdout)
    return folder


@pytest.fixture(scope="module")
def plain(guesser, tasks, tmp_path_factory):
    return grpo_run(tmp_path_factory.mktemp("plain") / "run", guesser, tasks)


@pytest.fixture(scope="module")
def twice(guesser, tasks, tmp_path_factory):
    return grpo_run(tmp_path_factory.mktemp("twice") / "run", guesser, tasks, "--updates-per-rollout", 2, steps=4)


@pytest.fixture(scope="module")
def with_kl(guesser, tasks, tmp_path_factory):
    return grpo_run(tmp_path_factory.mktemp("kl") / "run", guesser, tasks, "--beta", 0.1, steps=3)


def test_loss_is_about_0_on_policy_and_the_log_says_why(plain):
    rows = metrics(plain)
    assert all(abs(r["loss"]) < 1e-5 and r["grad_norm"] > 1e-2 and r["clip_frac"] == 0 for r in rows)
    assert "the ratio is 1 and the clip inert" in (plain / "stdout").read_text()
    assert all(r["mismatch"] < 1e-4 for r in rows)   # the sampler's log-probs are the trainer's


def test_second_update_on_a_rollout_has_ratios_off_1(twice):
    assert "ratio is 1" not in (twice / "stdout").read_text()
    assert [r["step"] for r in metrics(twice)] == [2, 4]
    assert any(abs(r["loss"]) > 1e-4 for r in metrics(twice))
    trained = json.loads((twice / "final.json").read_text())["budget"]["tokens_trained"]   # each token at each update
    assert trained == 2 * sum(sum(r["mask"]) for r in jsonl(twice / "samples.jsonl") if r["adv"])


def test_gradient_of_a_run_counts_answers_of_groups_without_spread(plain, guesser):
    """
    T43: the first step again, from the samples on disk and the weights that it began with: the mean over all 32
    answers, though those of groups without spread have advantage 0 and are left out of the backward pass.
    """
    rows, model = [r for r in jsonl(plain / "samples.jsonl") if r["step"] == 1], load_model(guesser)
    loss = 0
    for r in rows:
        ids, start = T(r["ids"]), r["prompt_length"]
        logp = (model(ids, [len(ids)]) @ model.head_weight.t()).log_softmax(-1)[start - 1:-1]
        loss = loss - r["adv"] * logp.gather(1, ids[start:, None]).mean() / len(rows)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert metrics(plain)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert len(rows) == 32 and 0 < metrics(plain)[0]["no_spread"] < 1


def test_same_seed_gives_the_same_run_and_another_seed_another(plain, guesser, tasks, tmp_path):
    again = grpo_run(tmp_path / "again", guesser, tasks)
    assert metrics(again) == metrics(plain) and weights(again) == weights(plain)
    assert (again / "samples.jsonl").read_bytes() == (plain / "samples.jsonl").read_bytes()
    other = grpo_run(tmp_path / "other", guesser, tasks, "--seed", 1)
    assert (other / "samples.jsonl").read_bytes() != (plain / "samples.jsonl").read_bytes()


def test_lam_0_runs_as_grpo_does(plain, guesser, tasks, tmp_path):
    zero = grpo_run(tmp_path / "zero", guesser, tasks, "--arm", "grpo_length_penalty", "--lam", 0)
    assert metrics(zero) == metrics(plain) and weights(zero) == weights(plain)
    half = grpo_run(tmp_path / "half", guesser, tasks, "--arm", "grpo_length_penalty", "--lam", 0.5)
    assert weights(half) != weights(plain)


@pytest.mark.parametrize("tokens", [1, 300])
def test_micro_batch_tokens_change_nothing_but_memory(plain, guesser, tasks, tmp_path, tokens):
    """The first step is one rollout of the same weights, so its gradient can be compared."""
    split = grpo_run(tmp_path / "split", guesser, tasks, "--micro-batch-tokens", tokens)
    assert metrics(split)[0]["grad_norm"] == pytest.approx(metrics(plain)[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("slots", [3, 7])
def test_slots_do_not_change_the_samples(plain, guesser, tasks, tmp_path, slots):
    few = grpo_run(tmp_path / "few", guesser, tasks, "--slots", slots, "--max-steps", 1)
    first = [[r["id"], r["ids"]] for r in jsonl(plain / "samples.jsonl") if r["step"] == 1]
    assert [[r["id"], r["ids"]] for r in jsonl(few / "samples.jsonl")] == first


# Every flag of the method, and which run it must change: (flags, base run, what changes)
EFFECTS = [
    (["--max-steps", 1], "plain", "samples"), (["--prompts-per-step", 3], "plain", "samples"),
    (["--num-generations", 4], "plain", "samples"), (["--max-new", 5], "plain", "samples"),
    (["--stop", "####"], "plain", "samples"), (["--temperature", 1.5], "plain", "samples"),
    (["--lr", 1e-2], "plain", "weights"), (["--warmup", 4], "plain", "weights"),
    (["--schedule", "linear"], "plain", "weights"), (["--grad-clip", 0.01], "plain", "weights"),
    (["--loss-norm", "token"], "plain", "weights"), (["--loss-norm", "constant"], "plain", "weights"),
    (["--beta", 0.5], "plain", "weights"), (["--precision", "bf16"], "plain", "weights"),
    (["--eps", 0.001], "twice", "weights"), (["--ratio", "answer"], "twice", "weights"),
    (["--updates-per-rollout", 4], "twice", "weights"),
    (["--kl-estimator", "k1"], "with_kl", "weights"), (["--kl-estimator", "k3"], "with_kl", "weights"),
    (["--kl-estimator", "exact"], "with_kl", "weights"), (["--beta", 5.0], "with_kl", "weights")]


@pytest.mark.slow
@pytest.mark.parametrize("flags, base, what", EFFECTS, ids=lambda x: " ".join(map(str, x)) if type(x) is list else "")
def test_every_flag_changes_something(flags, base, what, guesser, tasks, tmp_path, request):
    before = request.getfixturevalue(base)
    more = {"plain": [], "twice": ["--updates-per-rollout", 2], "with_kl": ["--beta", 0.1]}[base]
    steps = {"plain": 2, "twice": 4, "with_kl": 3}[base]
    after = grpo_run(tmp_path / "run", guesser, tasks, *more, *flags, steps=steps)
    if what == "samples":
        assert (after / "samples.jsonl").read_bytes() != (before / "samples.jsonl").read_bytes()
    assert weights(after) != weights(before)


def test_every_flag_of_the_method_is_in_the_table_above():
    """A new flag needs a row in EFFECTS, or a test that is named here."""
    elsewhere = {"arm", "lam", "preset", "slots", "micro_batch_tokens", "kl_everywhere",   # tested one by one here
                 "pool", "any_pool", "eval_other", "limit_other", "eval_n_other", "eval_kl",      # test_pool.py
                 "adapter", "lora_rank", "lora_alpha", "lora_targets",                              # test_lora.py
                 "optim"}                                                                   # test_common.py
    records = {"seed", "output_dir", "labbook", "curves", "resume", "save_every", "keep", "notes", "price_per_hour",
               "wandb", "device", "model", "task", "tasks_dir", "template", "limit", "eval_every", "eval_n",
               "eval_seed", "predict"}
    tested = {str(x)[2:].replace("-", "_") for flags, _, _ in EFFECTS for x in flags if str(x).startswith("--")}
    assert set(vars(grpo.get_args([]))) == tested | elsewhere | records


def test_presets_set_defaults_and_what_is_typed_wins():
    for name, values in grpo.PRESETS.items():
        got = vars(grpo.get_args(["--preset", name]))
        assert {k: got[k] for k in values} == values
    assert grpo.get_args(["--preset", "qwen-1.5b", "--lr", "1e-5"]).lr == 1e-5


def test_preset_help_prints_each_preset_as_it_would_be_typed(capsys):
    with pytest.raises(SystemExit) as e:
        grpo.get_args(["--preset", "help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert e.value.code == 0 and [words[0] for words in lines] == list(grpo.PRESETS)
    for name, *words in lines:
        assert {**vars(grpo.get_args(words)), "preset": name} == vars(grpo.get_args(["--preset", name]))


def test_kl_acts_on_groups_without_spread_by_choice(with_kl, plain, guesser, tasks, tmp_path):
    """Everywhere: all sampled tokens are trained. Not everywhere, or no KL: those of groups with spread alone."""
    def trained(folder):
        samples = jsonl(folder / "samples.jsonl")
        used = json.loads((folder / "final.json").read_text())["budget"]["tokens_trained"]
        return used, sum(sum(s["mask"]) for s in samples), sum(sum(s["mask"]) for s in samples if s["adv"])
    used, everything, spread = trained(with_kl)
    assert used == everything > spread
    only = grpo_run(tmp_path / "only", guesser, tasks, "--beta", 0.1, "--no-kl-everywhere", steps=3)
    used, everything, spread = trained(only)
    assert used == spread < everything
    assert weights(only) != weights(with_kl)
    used, everything, spread = trained(plain)
    assert used == spread


def test_kl_is_0_at_the_first_step_and_not_later(with_kl):
    first, *later = [r["kl"] for r in metrics(with_kl)]
    assert abs(first) < 1e-6 and all(abs(k) > 1e-6 for k in later)


@pytest.mark.parametrize("estimator, ratio", [("k2", "token"), ("exact", "answer")])
def test_old_and_start_are_read_at_the_temperature_of_sampling(estimator, ratio, guesser, tasks, tmp_path):
    """T25: with lr 0 policy, old policy and start stay the same weights: KL 0 and ratio 1, at the second update too."""
    folder = grpo_run(tmp_path / "run", guesser, tasks, "--temperature", 1.5, "--lr", 0, "--beta", 0.1,
                      "--kl-estimator", estimator, "--updates-per-rollout", 2, "--ratio", ratio)
    r, = metrics(folder)
    assert abs(r["kl"]) < 1e-6 and r["mismatch"] < 1e-4 and r["clip_frac"] == 0 and abs(r["loss"]) < 1e-5
    assert r["grad_norm"] > 1e-2


def test_beta_holds_the_policy_back(guesser, tasks, tmp_path):
    """The exact KL after some steps is smaller with a brake than with next to none."""
    ends = []
    for beta in (1e-6, 2.0):
        folder = grpo_run(tmp_path / f"beta{beta}", guesser, tasks, "--beta", beta, "--kl-estimator", "exact", steps=8)
        ends.append(metrics(folder)[-1]["kl"])
    assert 0 < ends[1] < 0.5 * ends[0]


# ----------------------------------------------------------------------------------------------------------------------
# What a run writes down (X50, X52)

def test_samples_of_every_step_are_on_disk(plain):
    rows = jsonl(plain / "samples.jsonl")
    assert [(r["step"], r["sample"]) for r in rows] == [(s, g) for s in (1, 2) for _ in range(4) for g in range(8)]
    for r in rows:
        assert len(r["ids"]) == len(r["mask"]) and r["mask"] == [0] * r["prompt_length"] + [1] * sum(r["mask"])
        assert r["finish"] in ("eos", "length") and (r["ids"][-1] == EOS) == (r["finish"] == "eos")
    for step in (1, 2):
        groups = {}
        for r in rows:
            if r["step"] == step:
                groups.setdefault(r["id"], []).append(r)
        assert all(len({tuple(r["ids"]) for r in g}) > 2 for g in groups.values())   # samples of a group differ
        assert [len(g) for g in groups.values()] == [8] * 4


@pytest.mark.parametrize("arm", ["dr_grpo", "random_reward", "permuted_reward", "format_only"])
def test_rewards_of_the_other_arms_are_what_they_say(arm, plain, guesser, tasks, tmp_path):
    """The first step's answers are those of arm grpo; what they are paid is the arm's own."""
    folder = grpo_run(tmp_path / "run", guesser, tasks, "--arm", arm, steps=1)
    rows, same = jsonl(folder / "samples.jsonl"), jsonl(plain / "samples.jsonl")[:32]
    assert [r["ids"] for r in rows] == [r["ids"] for r in same]
    reward, right = [r["reward"] for r in rows], [float(r["right"]) for r in rows]
    if arm == "dr_grpo":
        assert reward == right
        means = [sum(reward[i:i + 8]) / 8 for i in range(0, 32, 8)]
        assert [r["adv"] for r in rows] == pytest.approx([x - means[i // 8] for i, x in enumerate(reward)], abs=1e-6)
    elif arm == "format_only":
        assert reward == [float(r["answer"] is not None) for r in rows] != right
    else:
        assert set(reward) == {0.0, 1.0} and reward != right
        assert (sum(reward) == sum(right)) == (arm == "permuted_reward")
    assert metrics(folder)[0]["reward"] == pytest.approx(sum(reward) / 32)
    assert weights(folder) != weights(plain)


def test_rewards_belong_to_their_problems(plain, tasks, guesser, tmp_path):
    """Each reward again from the text and the problem that the id names, each advantage from its group's."""
    short = grpo_run(tmp_path / "short", guesser, tasks, "--arm", "grpo_length_penalty", "--lam", 0.5)
    answers = {r["id"]: r["answer"] for r in jsonl(tasks / "train.jsonl")}
    for folder, lam in [(plain, 0.0), (short, 0.5)]:
        rows = jsonl(folder / "samples.jsonl")
        for r in rows:
            marked = re.match(r".*#### *(\d+)", r["text"], re.DOTALL)
            right = r["finish"] == "eos" and bool(marked) and int(marked[1]) == answers[r["id"]]
            assert r["right"] == right, r
            assert r["reward"] == pytest.approx((1 - lam * sum(r["mask"]) / 24) if right else 0.0, abs=1e-6)
        for i in range(0, len(rows), 8):
            reward = T([r["reward"] for r in rows[i:i + 8]])
            assert len({r["id"] for r in rows[i:i + 8]}) == 1
            want = (reward - reward.mean()) / reward.std(correction=0).clamp(min=1e-9)
            assert torch.allclose(T([r["adv"] for r in rows[i:i + 8]]), want, atol=1e-3)


def test_training_raises_the_reward(guesser, tmp_path):
    """Every answer is 1, which the model says about half the time."""
    for i, split in enumerate(("train", "heldout-same", "heldout-different")):
        write_rows(tmp_path / f"{split}.jsonl", [problem(j, f"{j}?", 1) for j in range(8 * i, 8 * i + 8)])
    rows = metrics(grpo_run(tmp_path / "run", guesser, tmp_path, steps=25))
    first, last = (sum(r["right"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert first < 0.75 and last > first + 0.2, (first, last)
