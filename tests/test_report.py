"""
report.py: verdicts on results with known answers, margins, predictions, broken folders, and the files that it writes.
Run folders are simulated by fake_runs.py; one test reads those that train_grpo.py leaves.
"""
import importlib.util
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from fake_runs import evaluation, fake_run, rollouts
from helpers import ROOT, run_script

import common
import report
from common import UserError

P = 60
MIDDLE = np.linspace(0.1, 0.9, P)   # chances of 60 problems with a mean of one half


def arm_runs(folder, gains, arm="grpo", split="heldout-same", lenient=None, labbook=None, base=MIDDLE, **more):
    """One run folder for each gain: every problem's share of right answers moves by it, without a draw."""
    before = evaluation(base, exact=True, split=split, lenient=lenient)
    for seed, gain in enumerate(gains):
        after = evaluation(np.clip(base + gain, 0, 1), exact=True, split=split, lenient=lenient)
        fake_run(folder / f"{arm}-s{seed}", [(0, before), (20, after)], arm=arm, seed=seed, labbook=labbook, **more)


def study_of(folder):
    said = []
    runs, evals = report.load_all([folder], said)
    studies = report.make_studies(runs, evals, said)
    assert len(studies) == 1
    return studies[0], said


def verdict(folder, arm="grpo", split="heldout-same"):
    study, _ = study_of(folder)
    v = report.judge_condition(study, study.find(arm), split)
    return v, report.in_words(v, split) if "gain" in v else None


# ----------------------------------------------------------------------------------------------------------------------
# Verdicts with known answers

def test_gain_inside_the_spread(tmp_path):
    arm_runs(tmp_path, [0.0, 0.03125, 0.125])
    v, words = verdict(tmp_path)
    assert v["code"] == "spread" and v["spread"] > v["gain"] > 0
    assert "the spread over seeds (" in words and "exceeds the gain, and that is the finding; more steps, more" in words


def test_gain_outside_the_spread(tmp_path):
    arm_runs(tmp_path, [0.0625, 0.09375, 0.09375])
    v, words = verdict(tmp_path)
    assert v["code"] == "effect" and v["gain"] > v["floor"] >= v["spread"] > 0
    assert "more than the spread over seeds" in words and "the lenient reading agrees" in words
    assert v["gain"] == pytest.approx(np.mean(v["means"]) - v["before"])
    assert v["ci95"][0] <= v["gain"] <= v["ci95"][1]


def test_gain_that_a_control_shows_too(tmp_path):
    arm_runs(tmp_path, [0.0625, 0.09375, 0.09375])
    arm_runs(tmp_path, [0.0625, 0.09375, 0.09375], arm="random_reward")
    study, _ = study_of(tmp_path)
    verdicts = {(c.label, "heldout-same"): report.judge_condition(study, c, "heldout-same") for c in study.conditions}
    for (_, split), v in verdicts.items():
        v["split"] = split
    note = report.control_note(study, study.find("grpo"), verdicts["grpo", "heldout-same"], verdicts)
    assert "a control gains too (random_reward +0.0" in note and "not told apart" in note


def test_a_control_without_gain_is_not_named(tmp_path):
    arm_runs(tmp_path, [0.0625, 0.09375, 0.09375])
    arm_runs(tmp_path, [0.0, 0.0, 0.03125], arm="random_reward")
    study, _ = study_of(tmp_path)
    verdicts = {(c.label, "heldout-same"): report.judge_condition(study, c, "heldout-same") for c in study.conditions}
    for (_, split), v in verdicts.items():
        v["split"] = split
    assert report.control_note(study, study.find("grpo"), verdicts["grpo", "heldout-same"], verdicts) == ""


def test_a_learning_rate_of_0_is_a_control_and_not_the_arm(tmp_path):
    arm_runs(tmp_path / "a", [0.0, 0.0, 0.0], lr=0.0)
    arm_runs(tmp_path / "b", [0.1, 0.1], lr=None)
    runs = [report.load_run(p, []) for p in sorted(tmp_path.glob("*/*"))]
    said = []
    study, = report.make_studies(runs, [], said)
    assert {c.label: c.control for c in study.conditions} == {"grpo lr 0.0": True, "grpo lr default": False}
    assert study.find("grpo").label == "grpo lr default" and not any("lr 0.0" in x for x in said)
    assert [r[0] for r in report.control_table(study)["rows"]] == ["untrained", "grpo lr default", "grpo lr 0.0"]


def test_better_in_the_strict_reading_only(tmp_path):
    arm_runs(tmp_path, [0.0625, 0.09375, 0.09375], base=np.linspace(0.1, 0.6, P), lenient=np.full(P, 0.9))
    v, words = verdict(tmp_path)
    assert v["code"] == "format" and v["lenient"]["gain"] == 0
    assert "in the strict reading alone (lenient +0.000" in words and words.endswith("format")


def test_paired_significant_but_unpaired_not(tmp_path):
    arm_runs(tmp_path, [0.03125, 0.03125, 0.0625])
    v, words = verdict(tmp_path)
    assert 2 * v["se"] < v["gain"] < 2 * v["unpaired_se"] and v["code"] == "effect"
    assert "only pairing shows it: unpaired, two standard errors are" in words


def test_two_seeds_are_a_range_and_one_is_a_lead(tmp_path):
    arm_runs(tmp_path / "two", [0.0625, 0.09375])
    _, words = verdict(tmp_path / "two")
    assert "two seeds, a range" in words and "the range over seeds" in words and "spread" not in words
    arm_runs(tmp_path / "one", [0.0625])
    v, words = verdict(tmp_path / "one")
    assert v["spread"] is None and "one run, a lead" in words and "two paired standard errors" in words


def test_uninformative_at_zero_and_one_before_and_after(tmp_path):
    for name, base in (("zero", np.zeros(P)), ("one", np.ones(P))):
        arm_runs(tmp_path / name, [0.0, 0.0, 0.0], base=base)
        v, words = verdict(tmp_path / name)
        assert v["code"] == "uninformative" and "uninformative" in words
    arm_runs(tmp_path / "learned", [0.25, 0.25, 0.28125], base=np.zeros(P))   # from 0 it can still be learned
    assert verdict(tmp_path / "learned")[0]["code"] == "effect"


def test_a_loss_is_called_a_loss(tmp_path):
    arm_runs(tmp_path, [-0.0625, -0.09375, -0.09375])
    v, words = verdict(tmp_path)
    assert v["code"] == "worse" and "a loss, larger than" in words


def test_no_effect_is_found_where_there_is_none():
    """Three seeds without any gain and their own draws: at most a few of 200 studies may claim one."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(200):
        p = rng.beta(2, 2, P)
        x = [rng.binomial(32, p, (s, P)) / 32 for s in (1, 3)]
        found += report.judge(np.repeat(x[0], 3, 0), x[1], np.repeat(x[0], 3, 0), x[1])["code"] in ("effect", "worse")
    assert found <= 0.09 * 200


def test_mcnemar_by_hand():
    """8 repairs and 1 breakage: p = 2 (C(9,0) + C(9,1)) / 2^9 = 20 / 512; z = 7 / 3."""
    before, after = [0] * 8 + [1] + [0] * 5 + [1] * 6, [1] * 8 + [0] + [0] * 5 + [1] * 6
    f = report.mcnemar(before, after)
    assert (f["repairs"], f["breakages"], f["wrong"], f["right"]) == (8, 1, 13, 7)
    assert f["p"] == pytest.approx(20 / 512) and f["z"] == pytest.approx(7 / 3)
    assert report.mcnemar([1, 0], [1, 0])["p"] == 1.0


def test_bootstrap_resamples_problems_as_pairs():
    rng = np.random.default_rng(1)
    before = rng.random((1, 400))
    low, high = report.paired_bootstrap(before, before + 0.1 + 0.2 * rng.standard_normal((1, 400)))
    assert high - low == pytest.approx(2 * 1.96 * 0.2 / 20, rel=0.15) and low < 0.1 < high


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons

def test_unequal_conditions_are_refused_by_name(tmp_path):
    arm_runs(tmp_path, [0.1, 0.1, 0.1])
    after = evaluation(MIDDLE, n=8, exact=True)
    rows = [(0, evaluation(MIDDLE, n=8, exact=True)), (20, {**after, "template_sha256": "u" * 64})]
    fake_run(tmp_path / "opd-s0", rows, arm="opd", script="train_opd", eval_n=8)
    study, _ = study_of(tmp_path)
    pair = report.compare(study, study.find("grpo"), study.find("opd"), "heldout-same")
    assert pair["code"] == "refused" and "n 32 against 8" in pair["why"]
    assert any(w.startswith("template_sha256 tttt") for w in pair["why"])
    v = report.judge_condition(study, study.find("opd"), "heldout-same")   # before and after differ too
    assert v["code"] == "refused" and v["why"] == ["template_sha256 tttttttttttt against uuuuuuuuuuuu"]


@pytest.mark.parametrize("key, value", [("temperature", 0.7), ("limit", 59), ("extractor", "number-2"),
                                        ("max_new", 128), ("seed", 1), ("task", "gsm8k")])
def test_every_condition_counts(key, value):
    a = evaluation(MIDDLE, exact=True)
    assert report.differing_rows(a, a) == []
    assert report.differing_rows(a, {**a, key: value})[0].startswith(key)


def test_other_problems_are_refused():
    a, b = evaluation(MIDDLE, exact=True), evaluation(MIDDLE, exact=True)
    b["problems"][0]["id"] = "another"
    assert report.differing_rows(a, b) == ["the problems"]


def test_settings_that_differ_are_listed_and_limit_what_is_claimed(tmp_path):
    arm_runs(tmp_path / "a", [0.1, 0.1])
    arm_runs(tmp_path / "b", [0.05, 0.05], lr=1e-4)
    arm_runs(tmp_path / "c", [0.05, 0.05], lr=1e-4, num_generations=16)
    runs = [report.load_run(tmp_path / x / "grpo-s0", []) for x in "abc"]
    assert report.differing(runs[0], runs[1]) == ["lr"]
    assert report.differing(runs[0], runs[2]) == ["lr", "num_generations"]
    said = []
    conditions = report.make_conditions(runs, said)
    assert {c.label for c in conditions} == {"grpo lr 3e-05 num_generations 8", "grpo lr 0.0001 num_generations 8",
                                             "grpo lr 0.0001 num_generations 16"}
    assert len({c.look[0] for c in conditions}) == 1 and len({c.look[1:] for c in conditions}) == 3
    base = evaluation(MIDDLE, exact=True)
    study = report.Study("arithmetic", {}, conditions, "heldout-same", None, ["heldout-same"], {"heldout-same": base})
    pair = {frozenset((x.runs[0].folder.parent.name, y.runs[0].folder.parent.name)):
            report.compare(study, x, y, "heldout-same") for x in conditions for y in conditions if x is not y}
    assert pair[frozenset("ab")]["explains"] == "one setting differs"
    assert pair[frozenset("ac")]["explains"] == "describes, does not explain"


def test_equal_seeds_and_equal_answers_are_said(tmp_path):
    arm_runs(tmp_path, [0.1, 0.1])            # the same answers from two seeds
    after = evaluation(np.clip(MIDDLE + 0.05, 0, 1), exact=True)
    fake_run(tmp_path / "grpo-again", [(0, evaluation(MIDDLE, exact=True)), (20, after)], seed=1)
    study, said = study_of(tmp_path)
    assert any("seed 1 ran twice" in x for x in said) and len(study.find("grpo").runs) == 2
    arm_runs(tmp_path / "equal", [0.1, 0.1])
    assert any("seeds 0 and 1 give the same answers" in x for x in study_of(tmp_path / "equal")[1])


def test_tuning_seeds_and_failed_runs_enter_no_verdict(tmp_path):
    arm_runs(tmp_path, [0.1, 0.1, 0.1])
    rows = [(0, evaluation(MIDDLE, exact=True)), (20, evaluation(MIDDLE, exact=True))]
    fake_run(tmp_path / "tune", rows, seed=100)
    fake_run(tmp_path / "bad", rows[:1], seed=3, status="failed")
    fake_run(tmp_path / "worse", [], seed=4, status="failed")    # it died before its first evaluation
    study, said = study_of(tmp_path)
    assert study.find("grpo").seeds == [0, 1, 2] and {r.name for r in study.lost} == {"tune", "bad", "worse"}
    assert any("tuning runs" in x for x in said)
    rows = report.runs_table(study, [])["rows"]
    assert ["grpo (bad)", "3", "failed"] in [r[:3] for r in rows] and any("tuning" in r[2] for r in rows)


def test_lora_and_all_weights_are_two_conditions_with_plain_names_and_a_verdict_each(tmp_path):
    lora = {"lora_rank": 16, "lora_alpha": 32, "lora_targets": ["q_proj"], "lr": 3e-4}
    arm_runs(tmp_path / "full", [0.0, 0.03125, 0.125])
    arm_runs(tmp_path / "lora", [0.0625, 0.09375, 0.09375], **lora)
    runs = [report.load_run(p, []) for p in sorted(tmp_path.glob("*/*"))]
    assert report.differing(runs[0], runs[-1]) == ["lr", "lora_rank"]   # alpha and targets come with the rank
    study, = report.make_studies(runs, [], [])
    codes = {c.label: report.judge_condition(study, c, "heldout-same")["code"] for c in study.conditions}
    assert codes == {"grpo all weights lr 3e-05": "spread", "grpo LoRA 16 lr 0.0003": "effect"}
    assert all(c.seeds == [0, 1, 2] for c in study.conditions)
    # a run that goes on with an adapter has its rank from there, and config.json says so under `used`
    fake_run(tmp_path / "on", [], adapter="runs/sft")
    config = json.loads((tmp_path / "on" / "config.json").read_text())
    (tmp_path / "on" / "config.json").write_text(json.dumps({**config, "used": {"lora_rank": 8, "lr": 1e-3}}))
    assert report.settings(report.load_run(tmp_path / "on", []))["lora_rank"] == 8


def test_each_variant_is_read_against_the_baseline_of_its_own_kind(tmp_path):
    lora = {"lora_rank": 16, "lr": 3e-4}
    arm_runs(tmp_path / "a", [0.0625, 0.09375, 0.09375])
    arm_runs(tmp_path / "b", [0.0625, 0.09375, 0.09375], **lora)
    arm_runs(tmp_path / "c", [0.1], arm="sft", script="train_sft", lr=1e-3)
    arm_runs(tmp_path / "d", [0.05], arm="sft", script="train_sft", **{**lora, "lr": 1e-3})
    runs = [report.load_run(p, []) for p in sorted(tmp_path.glob("*/*"))]
    study, = report.make_studies(runs, [], [])
    verdicts = {(c.label, "heldout-same"): report.judge_condition(study, c, "heldout-same") for c in study.conditions}
    margins = {k: (None, "") for k in verdicts}
    said = report.sentences(study, verdicts, margins, [])
    assert len(said) == 2   # the baselines are the third clause, and have no sentence of their own
    for line, kind in zip(sorted(said), ("LoRA 16", "all weights")):
        assert line.startswith(f"grpo {kind} lr ") and f"and against sft {kind} it is " in line
        assert "one run, a lead; 61 s against 60 s" in line


def test_a_seed_on_another_kind_of_device_is_the_same_condition_unless_the_products_differ(tmp_path):
    before, after = evaluation(MIDDLE, exact=True), evaluation(MIDDLE + 0.05, exact=True)
    for seed, (device, found) in enumerate([("cpu", "cpu, x86_64, 1 threads"), ("auto", "cpu, arm64, 2 threads"),
                                            ("auto", "NVIDIA H200")]):
        folder = fake_run(tmp_path / f"grpo-s{seed}", [(0, before), (20, after)], seed=seed, device=device,
                          precision="auto")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "device": found}))
    study, said = study_of(tmp_path)
    assert {c.label: c.seeds for c in study.conditions} == {"grpo precision fp32": [0, 1], "grpo precision bf16": [2]}
    assert "precision bf16, fp32; presets none; torch" in report.describe(study)


def test_the_time_of_a_pool_is_no_generation_and_the_last_record_of_a_distillation_counts(tmp_path):
    run = report.load_run(fake_run(tmp_path / "r", []), [])
    pool = {"kind": "data", "script": "eval_passk", "data": [{"sha256": "d" * 64}], "budget": {"wall_s": 118.0}}
    assert report.generation_s([pool], run) is None
    made = [{**pool, "script": "data/distil/prepare", "budget": {"wall_s": x}} for x in (20.0, 60.0)]
    assert report.generation_s([*made, pool], run) == 60.0 and report.generation_s([], run) is None
    here = {**made[0], "data": [{"path": run.data[0]["path"], "sha256": "d" * 64}]}   # the same bytes, made elsewhere
    assert report.generation_s([here, *made], run) == 20.0


def test_a_whole_study_folder_may_be_named_with_its_tuning_runs_and_its_teacher(tmp_path):
    arm_runs(tmp_path, [0.1, 0.1, 0.1])
    rows = [(0, evaluation(MIDDLE, exact=True)), (20, evaluation(MIDDLE, exact=True))]
    fake_run(tmp_path / "tune-full-1e-4", rows, seed=100, lr=1e-4)
    fake_run(tmp_path / "tune-sft-1e-3", [], arm="sft", script="train_sft", seed=100, eval_n=0)   # by its loss alone
    teacher = fake_run(tmp_path / "teacher", [], arm="pretrain", script="pretrain")
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "model": {"name": None}}))
    study, said = study_of(tmp_path)
    assert [c.label for c in study.conditions] == ["grpo"] and study.conditions[0].seeds == [0, 1, 2]
    assert {r.name for r in study.lost} == {"tune-full-1e-4", "tune-sft-1e-3"}
    assert [r[2] for r in report.runs_table(study, [])["rows"]][-2:] == ["ok, tuning"] * 2


# ----------------------------------------------------------------------------------------------------------------------
# Margins

def level(rule, gain, spread=0.05, se=0.01):
    return report.apply_margin(report.parse_margin(rule), gain, spread, se)


def test_the_short_form():
    rule = "heldout-same: gain > max(spread, 2*se)"
    assert level(rule, 0.06) == "success" and level(rule, 0.05) == "useless"
    assert level(rule, 0.06, 0.0, 0.04) == "useless"


def test_three_levels():
    rule = "heldout-different: success if gain > spread and gain > 2*se; weak if gain > se; useless otherwise"
    assert [level(rule, g) for g in (0.06, 0.03, 0.01, -1)] == ["success", "weak", "useless", "useless"]


@pytest.mark.parametrize("rule, word", [
    ("gain > 0.1", "expected SPLIT: RULE"),
    ("heldout-same:", "no test|each once"),
    ("heldout-same: success if gain > 0.1; useless if gain < 0.1", "a gain of 0.1 .* has no level"),
    ("heldout-same: success if gain > 0.7; weak if gain > 0.5 and gain < 0.6; useless if gain <= 0.5", "has no level"),
    ("heldout-same: success if gain > 2*spread; useless if gain < spread", "has no level"),
    ("heldout-same: useless if gain < 0; success otherwise", "from best to worst"),
    ("heldout-same: success if gain < 0; useless otherwise", "though a smaller one is"),
    ("heldout-same: success if gain > 0; weak if gain > 0.1; useless otherwise", "ever weak"),
    ("heldout-same: success if gain > 0; weak otherwise; useless otherwise", "no clause"),
    ("heldout-same: success if gain >; useless otherwise", "no test"),
    ("heldout-same: success if __import__('os'); useless otherwise", "not allowed"),
    ("heldout-same: gain > 9**9**9", "not allowed"),
    ("heldout-same: gain > accuracy", "not allowed"),
    ("heldout-same: spread > 0.1", "does not compare the gain"),
    ("heldout-same: great if gain > 0; useless otherwise", "no clause"),
])
def test_rules_that_cannot_judge_are_refused(rule, word):
    with pytest.raises(UserError, match=word):
        report.parse_margin(rule)


def test_a_margin_must_be_older_than_every_run_it_judges(tmp_path):
    book = tmp_path / "labbook.md"
    report.register_margin(str(book), "heldout-same: gain > spread")
    arm_runs(tmp_path / "runs", [0.1, 0.1, 0.1], labbook=book)
    study, _ = study_of(tmp_path / "runs")
    runs = study.find("grpo").runs
    margin, said = report.margin_for(common.read_labbook(book)[0], "heldout-same", runs)
    assert margin["text"] == "heldout-same: gain > spread" and said.startswith("margin of ")
    v = report.judge_condition(study, study.find("grpo"), "heldout-same")
    assert report.margin_level(margin, v) == "success"
    # one that came after the runs does not count, neither beside an older one nor alone
    report.register_margin(str(book), "heldout-same: gain > 0")
    margin, said = report.margin_for(common.read_labbook(book)[0], "heldout-same", runs)
    assert margin["text"] == "heldout-same: gain > spread" and "1 later one(s) do not count" in said
    late = tmp_path / "late.md"
    arm_runs(tmp_path / "more", [0.1], labbook=late)
    report.register_margin(str(late), "heldout-same: gain > 0")
    runs = study_of(tmp_path / "more")[0].find("grpo").runs
    margin, said = report.margin_for(common.read_labbook(late)[0], "heldout-same", runs)
    assert margin is None and said.startswith("refused: the margin of") and "younger than the run grpo-s0" in said
    assert report.margin_for([], "heldout-same", runs) == (None, "no margin was registered for heldout-same")


def test_a_margin_on_the_spread_does_not_judge_one_seed(tmp_path):
    arm_runs(tmp_path, [0.1])
    v, _ = verdict(tmp_path)
    assert report.margin_level(report.parse_margin("heldout-same: gain > max(spread, 2*se)"), v).startswith("cannot be")
    assert report.margin_level(report.parse_margin("heldout-same: gain > 0.05"), v) == "success"


# ----------------------------------------------------------------------------------------------------------------------
# Predictions

RECORD = {"status": "ok", "config": {"limit": 60}, "budget": {"wall_s": 105.0, "tokens_sampled": 1000}, "losses": {
    "valid": 1.5}, "scores": {"heldout-same": {"before": {"pass@1": 0.40, "se": {"1": 0.03}},
                                               "after": {"pass@1": 0.57, "se": {"1": 0.02}, "greedy": 0.5}}}}


@pytest.mark.parametrize("text, outcome", [
    ("heldout-same.pass@1 >= 0.55", "hit"), ("heldout-same.pass@1 >= 0.60", "within noise"),
    ("heldout-same.pass@1 >= 0.62", "miss"), ("heldout-same.pass@1 = 0.5 +- 0.07", "hit"),
    ("heldout-same.gain > 0.16", "hit"), ("heldout-same.gain > 0.18", "within noise"),
    ("heldout-same.gain < 0.05", "miss"),
    ("wall_s <= 100", "within noise"), ("wall_s <= 90", "miss"), ("losses.valid < 1.5", "within noise"),
    ("tokens_sampled = 1000 +- 0", "hit"), ("heldout-same.greedy > 0.6", "within noise"),
    ("heldout-same.entropy > 0.6", "open"), ("heldout-different.pass@1 > 0", "open")])
def test_predictions_are_reconciled(text, outcome):
    got = report.reconcile(common.parse_prediction(text), RECORD)
    assert got["outcome"] == outcome and got["noise_is"] is not None


@pytest.mark.parametrize("text", ["better", "heldout-same.pass1 > 0.5", "heldout-same.pass@1 > high", "wall_s = 5",
                                  "wall_s > 5 +- 1", "heldout-same.pass@1 0.5", "accuracy > 0.5"])
def test_what_is_no_prediction_is_refused(text):
    with pytest.raises(UserError, match="expected KEY OP NUMBER"):
        common.parse_prediction(text)


def test_the_ledger_counts_and_asks_for_lessons(tmp_path, capsys):
    book = tmp_path / "labbook.md"
    for run, text in (("r", "heldout-same.pass@1 >= 0.1"), ("r", "heldout-same.pass@1 > 0.9"), ("gone", "wall_s < 5")):
        common.record_prediction(book, run, text)
    before, after = evaluation(MIDDLE, exact=True), evaluation(MIDDLE, exact=True)
    fake_run(tmp_path / "r", [(0, before), (20, after)], labbook=book)
    common.append_record(book, {"kind": "start", "run_id": "gone"}, "start")
    rows, said = report.ledger(common.read_labbook(book)[0])
    assert [r[4] for r in rows] == ["hit", "miss", "open"] and "a lesson is owed" in rows[1][6]
    assert said == "3 predictions: 1 hit, 0 within noise, 1 miss, 1 open; hit rate 0.50"
    report.add_lesson(str(book), "r: the base was weaker than it looked")
    assert report.check_labbook(str(book)) == 0
    out = capsys.readouterr().out
    assert "the chain is whole" in out and "gone has a start and no end" in out and "weaker than it looked" in out
    with pytest.raises(UserError, match="holds no prediction for a run 'other'"):
        report.add_lesson(str(book), "other: text")


def test_two_studies_with_runs_of_one_name_keep_their_predictions_and_margins_apart(tmp_path):
    book, before = tmp_path / "labbook.md", evaluation(MIDDLE, exact=True)
    for study, gain in (("toy", 0.25), ("large", 0.0)):
        if study == "large":   # younger than the toy's runs, older than these
            report.register_margin(str(book), "heldout-same: gain > 0.1")
        common.record_prediction(book, "lora-s0", "heldout-same.pass@1 >= 0.6")
        after = evaluation(np.clip(MIDDLE + gain, 0, 1), exact=True)
        for status in ("failed", "ok"):   # it failed once, and went on
            shutil.rmtree(tmp_path / study, ignore_errors=True)
            fake_run(tmp_path / study / "lora-s0", [(0, before), (20, after)], labbook=book, status=status)
    records = common.read_labbook(book)[0]
    assert [r[4] for r in report.ledger(records)[0]] == ["hit", "miss"]
    report.add_lesson(str(book), "lora-s0: it was a larger model")
    assert [r[6] for r in report.ledger(common.read_labbook(book)[0])[0]] == ["", "it was a larger model"]
    margins = {x: report.margin_for(records, "heldout-same", study_of(tmp_path / x)[0].find("grpo").runs)
               for x in ("toy", "large")}
    assert margins["toy"][0] is None and "younger than the run lora-s0" in margins["toy"][1]
    assert margins["large"][0]["text"] == "heldout-same: gain > 0.1"


def test_starts_without_an_end_are_named_also_where_the_run_was_begun_again(tmp_path, capsys):
    book = tmp_path / "labbook.md"
    for kind, run in (("start", "a"), ("start", "a"), ("start", "a"), ("run", "a"), ("start", "a"), ("run", "a"),
                      ("start", "b"), ("run", "b"), ("start", "c")):
        common.append_record(book, {"kind": kind, "run_id": run}, kind)
    common.append_record(book, {"kind": "start", "run_id": "c", "config": {"output_dir": "elsewhere"}}, "start")
    assert report.unended(common.read_labbook(book)[0]) == (["c", "c"], {"a": 2})
    assert report.check_labbook(str(book)) == 0
    out = capsys.readouterr().out
    assert "begun again without an end" in out and ": a x 2\n" in out and "running: c has a start and no end" in out


def test_an_edited_labbook_fails_the_check(tmp_path):
    book = tmp_path / "labbook.md"
    report.register_margin(str(book), "heldout-same: gain > 0.1")
    common.record_prediction(book, "r", "wall_s < 5")
    book.write_text(book.read_text().replace("gain > 0.1\"", "gain > 0.2\""))
    assert report.check_labbook(str(book)) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Findings

def test_a_number_of_one_run_is_a_lead():
    assert report.read_off("KL 1", 0.5, 1, True) == ("KL 1, one run, a lead", 0.5, 1, "cannot be told")
    assert [report.read_off("KL 1", 0.5, 3, good)[3] for good in (True, False)] == ["holds", "fails"]


def test_claims_hold_fail_or_cannot_be_told():
    E = report.Effect
    assert report.claim("x", E(0.1, 0.02, 0.01, 3), "up")[3] == "holds"
    assert report.claim("x", E(0.1, 0.02, 0.01, 3), "down")[3] == "fails"
    assert report.claim("x", E(0.1, 0.2, 0.01, 3), "up")[3] == "cannot be told"
    assert report.claim("x", E(0.1, 0.2, 0.01, 3), "flat")[3] == "holds"
    assert report.claim("x", E(0.1, 0.02, 0.01, 3), "flat")[3] == "fails"
    assert report.claim("x", E(0.1, None, 0.01, 1), "up")[3] == "cannot be told"   # one run is a lead
    assert report.claim("x", E(-0.1, 0.02, None, 3), "not up")[3] == "holds"
    assert report.claim("x", E(0.008, 0.02, None, 3), 0.01)[3] == "holds"
    assert report.claim("x", None, "up")[3] == "cannot be told"
    assert report.overall(["holds", "cannot be told"]) == "cannot be told"
    assert report.overall(["holds", "fails"]) == "fails" and report.overall(["holds"]) == "holds at this scale"


def test_findings_are_computed_from_what_ran(tmp_path):
    arm_runs(tmp_path, [0.1, 0.125, 0.125])
    for seed in range(3):
        rows = [(0, evaluation(MIDDLE, exact=True, length=40)), (20, evaluation(MIDDLE, exact=True, length=30))]
        fake_run(tmp_path / f"rft-s{seed}", rows, arm="rft_shortest", script="train_rft", seed=seed)
    study, _ = study_of(tmp_path)
    rows = {r[0]: r for r in report.findings_table(study)["rows"]}
    assert list(rows) == [f"F{i}" for i in (*range(1, 16), 17, 18, 20, 30, 31, 33)]
    assert "rft_shortest median_length_right on heldout-same: -10, noise 0 (holds)" in rows["F1"][2]
    assert rows["F1"][5] == "cannot be told" and "not measured" in rows["F1"][2]       # rft_random did not run
    assert rows["F3"][2] == "not measured in these runs" and rows["F3"][5] == "cannot be told"   # no arm of it ran
    assert rows["F33"][5] == "holds at this scale" and rows["F33"][4] == "3"
    assert rows["F14"][5] == "cannot be told"


def test_slope_by_hand():
    b, se = report.slope([(0, 1.0), (100, 2.0), (200, 4.0)])
    assert b == pytest.approx(1.5) and se == pytest.approx(np.sqrt((1 / 36 + 4 / 36 + 1 / 36) / 1 / 2))
    assert report.slope([(0, 1.0), (100, 2.0)]) is None


# ----------------------------------------------------------------------------------------------------------------------
# The whole program

@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report on two arms and a baseline, with broken folders beside them -> (folder of the report, its output)."""
    top = tmp_path_factory.mktemp("whole")
    book, runs = top / "labbook.md", top / "runs"
    report.register_margin(str(book), "heldout-same: success if gain > max(spread, 2*se); weak if gain > 0; useless "
                                      "otherwise")
    rng = np.random.default_rng(0)
    for arm, script, gain in (("grpo", "train_grpo", 0.1), ("opd", "train_opd", 0.0), ("sft", "train_sft", 0.05)):
        for seed in range(3):
            rows = []
            for step in (0, 10, 20):
                for split, part in (("heldout-same", 1), ("heldout-different", 0.2)):
                    p = np.clip(MIDDLE + part * gain * step / 20 + 0.01 * seed * (step > 0), 0, 1)
                    rows.append((step, evaluation(p, split=split, seed=int(rng.integers(99)) if step else 0)))
            samples = rollouts((1, 6, 11, 15, 20)) if arm == "grpo" else ()   # first, last, three between
            fake_run(runs / f"{arm}-s{seed}", rows, arm=arm, script=script, seed=seed, labbook=book, samples=samples,
                     data=("e" if arm == "sft" else "d") * 64)
    made = {"kind": "data", "script": "data/distil/prepare", "data": [{"path": "x", "sha256": "e" * 64}],
            "budget": {"wall_s": 42.0}}
    common.append_record(book, made, "- distillation data")
    fake_run(runs / "lost", [], seed=7, labbook=book, status="no end")
    (runs / "foreign").mkdir()
    (runs / "foreign" / "notes.txt").write_text("not ours")
    (runs / "torn").mkdir()
    (runs / "torn" / "config.json").write_text('{"args": {')
    with open(runs / "grpo-s1" / "metrics.jsonl", "a") as f:
        f.write('{"step": 21, "rew')
    before = {p: p.read_bytes() for p in runs.rglob("*") if p.is_file()}
    done = run_script("report.py", "--runs", runs, "--labbook", book, "--output-dir", top / "out")
    assert done.returncode == 0, done.stderr
    assert {p: p.read_bytes() for p in runs.rglob("*") if p.is_file()} == before   # it reads, and writes nothing there
    return top / "out", done.stdout


def test_every_figure_is_written_twice(written):
    out, said = written
    for name in ("length-accuracy", "tokens", "entropy", "opd", "passk", "gap-parts", "final-passk", "distinct",
                 "gain-in-out", "right-wrong", "length-in-out", "reward", "kl", "slope", "final-table"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (out / f"{name}.svg").read_text()[:900]
    assert "15 figures" in said


def test_what_was_skipped_is_said(written):
    _, said = written
    assert "foreign: skipped, no config.json" in said and "torn: skipped, config.json cannot be used" in said
    assert "lost: half-written (no end" in said and "metrics.jsonl: 1 torn or foreign rows left out, 20 read" in said
    assert "table Controls left out" in said


def test_the_sentence_has_three_clauses_and_numbers(written):
    _, said = written
    line = next(x for x in said.split("\n") if x.startswith("grpo, 3 seeds"))
    assert "20 steps (tools advise 300), 240 problems (500)" in line
    assert re.search(r"on the same family, pass@1 on heldout-same goes 0\.\d{3} to 0\.\d{3} \(\+0\.1\d\d\): more than "
                     r"the spread over seeds .* \[by the margin: success\]; on a different family, .*; and against sft",
                     line)
    assert "42 s of generation and 61 s: wall clock, which is not compute; describes, does not explain" in line


@pytest.mark.parametrize("share, said", [(0.3, True), (0.05, False)])
def test_a_clip_that_took_much_of_the_gradient_is_named_in_the_verdict(share, said, tmp_path):
    evals = [(0, evaluation([0.3] * 20)), (20, evaluation([0.5] * 20, seed=1))]
    for seed in range(2):
        fake_run(tmp_path / f"s{seed}", evals, seed=seed, metrics=[{"step": 20, "clip_frac": share}])
    notes = []
    study, = report.make_studies(*report.load_all([tmp_path], notes), notes)
    verdicts = {(c.label, x): v for c in study.conditions for x in study.splits
                if (v := report.judge_condition(study, c, x))}
    line, = report.sentences(study, verdicts, {key: (None, "") for key in verdicts}, [])
    assert ("the clip took the gradient of 30% of the tokens" in line) == said


def test_tables_and_verdicts_are_plain(written):
    out, _ = written
    text = (out / "tables.md").read_text()
    for title in ("Final table", "Runs", "Verdicts", "Findings", "Comparisons", "Budget"):
        assert f"## {title}" in text
    assert "42.0 generation + 60.0 SFT" in text and "grpo, spread" in text and "| untrained |" in text
    rows = [json.loads(x) for x in (out / "verdicts.json").read_text().split("\n") if x]
    assert {(r["arm"], r["split"]) for r in rows} == {(a, s) for a in ("grpo", "opd", "sft") for s in
                                                      ("heldout-same", "heldout-different")}


def test_the_page_stands_alone(written):
    out, _ = written
    page = (out / "report.html").read_text()
    assert len(page) < 5e6 and page.count("data:image/svg+xml;base64,") == 15
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", page) and "@import" not in page and "fetch(" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    rows = json.loads(data)
    assert len(rows) == 80 and {r["step"] for r in rows} == {1, 6, 11, 15, 20} and "80 rollouts of training" in page
    assert {r["finish"] for r in rows} == {"eos", "length"}


@pytest.mark.slow
def test_the_page_in_a_browser(written, tmp_path):
    """Chromium runs the page from a file: the reader counts, filters and shows the kinds of tokens."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        pytest.skip("needs package chromium")
    page = (written[0] / "report.html").read_text()
    rows = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    grpo_right = [r for r in rows if r["right"] and r["step"] == 20]
    change = "".join(f"pick['{k}'].value = '{v}'; pick['{k}'].onchange();" for k, v in
                     (("arm", "grpo"), ("step", 20), ("answer", "right")))
    for name, more, count in (("all", "", len(rows)), ("some", f"<script>{change}</script>", len(grpo_right))):
        (tmp_path / f"{name}.html").write_text(page.replace("</body>", more + "</body>"))
        done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                               f"--user-data-dir={tmp_path / name}", (tmp_path / f"{name}.html").as_uri()],
                              capture_output=True, text=True, timeout=100)
        shown = done.stdout.rpartition('id="count"')[2]
        assert f">{count} of {len(rows)} rollouts<" in shown and 0 < count
        assert shown.count("<header>") == min(count, 40)
        assert '<span class="trained">' in shown and '<span class="injected">[tool: 4]' in shown
    assert shown.count('class="card ok"') == count and "</script><b>" not in shown.rpartition("<script")[0]


def test_segments_follow_the_mask():
    from helpers import tiny_tokenizer
    rows, tokenizer = rollouts(steps=(1,)), tiny_tokenizer()
    assert report.segments(rows[1], tokenizer) == [
        ["prompt", "<|user|>What is 0 + 1? </script><b>&</b><|end|><|assistant|>"], ["trained", "so it is "],
        ["injected", "[tool: 4]\n"], ["trained", "#### 1"]]
    assert [k for k, _ in report.segments(rows[8], tokenizer)] == ["prompt", "sampled"]   # advantage 0: no gradient
    assert report.segments(rows[1], None) == [["trained", "so it is"]]


@pytest.mark.parametrize("make, word", [
    (lambda p: p.mkdir(), "nothing to report: 0 run folders"),
    (lambda p: None, "there is nothing by that name"),
    (lambda p: fake_run(p / "x", [(0, evaluation(MIDDLE))], status="no end"), "nothing to report: 1 run folders"),
    (lambda p: p.write_text("{}"), "skipped, it is no result of eval_passk.py"),
])
def test_nothing_usable_is_refused(tmp_path, capsys, make, word):
    make(tmp_path / "runs")
    args = report.get_args(["--runs", str(tmp_path / "runs"), "--output-dir", str(tmp_path / "out")])
    with pytest.raises(UserError) as e:
        report.report(args)
    assert word in capsys.readouterr().out + str(e.value) and not (tmp_path / "out").exists()


def test_an_empty_folder_ends_in_one_line_and_code_2(tmp_path):
    done = run_script("report.py", "--runs", tmp_path, "--output-dir", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nothing to report" in done.stderr


def test_a_bad_rule_leaves_the_labbook_alone(tmp_path):
    with pytest.raises(UserError, match="levels must go from best to worst"):
        report.register_margin(str(tmp_path / "labbook.md"), "heldout-same: success if gain > 0.1")
    assert not (tmp_path / "labbook.md").exists()
    with pytest.raises(UserError, match="no such file"):
        report.check_labbook(str(tmp_path / "labbook.md"))


@pytest.mark.slow
def test_a_report_on_real_runs(tmp_path, guesser, tasks):
    for seed in (0, 1):
        done = run_script("train_grpo.py", "--model", guesser, "--tasks-dir", tasks, "--lr", 1e-3, "--max-steps", 3,
                          "--prompts-per-step", 4, "--num-generations", 4, "--max-new", 16, "--limit", 4, "--eval-n", 8,
                          "--eval-every", 1, "--seed", seed, "--labbook", tmp_path / "labbook.md", "--output-dir",
                          tmp_path / "runs" / f"grpo-s{seed}", "--device", "cpu")
        assert done.returncode == 0, done.stderr
    done = run_script("report.py", "--runs", tmp_path / "runs", "--labbook", tmp_path / "labbook.md", "--output-dir",
                      tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "grpo, two seeds, a range" in done.stdout and "figure opd left out: no arm opd" in done.stdout
    rows = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "out" / "report.html").read_text(), re.S)[1])
    assert len(rows) == 3 * 2 * 4 and {k for r in rows for k, _ in r["text"]} <= {"prompt", "trained", "sampled"}
    assert all(r["text"][0][1].endswith("<|assistant|>") for r in rows)


# ----------------------------------------------------------------------------------------------------------------------
# Other tools

@pytest.mark.parametrize("tool", ["jq", "pandas"])
def test_the_readmes_lines_for_other_tools_read_our_files(tool, tmp_path):
    if not (shutil.which("jq") if tool == "jq" else importlib.util.find_spec("pandas")):
        pytest.skip(f"needs package {tool}")
    (tmp_path / "labbook.md").write_text("# Lab book\n\nSome prose.\n")
    fake_run(tmp_path / "runs" / "lora", [(0, evaluation(MIDDLE)), (20, evaluation(MIDDLE + 0.1, seed=1))],
             labbook=tmp_path / "labbook.md")
    lines = [x for x in (ROOT / "README.md").read_text().split("\n")
             if x.startswith(("jq ", "grep ", "python -c \"import pandas"))]
    lines = [x.replace("python ", f"{sys.executable} ", 1) for x in lines if tool in x]
    assert len(lines) == {"jq": 2, "pandas": 1}[tool]
    for line in lines:
        got = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert got.returncode == 0 and not got.stderr, got.stderr
        assert "pass@1" in got.stdout or "lora" in got.stdout or "heldout-same" in got.stdout
