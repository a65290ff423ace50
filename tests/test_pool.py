"""
Screened pools: what eval_passk.py --keep writes and refuses, what --pool refuses, and the evaluations of a run that
look beyond its task (X51, A10).
"""
import json
import os
import shlex
import shutil
import stat
from pathlib import Path

import pytest
import torch
from helpers import problem, read_rows, tiny_folder, tiny_tokenizer, write_rows
from launch import jsonl, refused, run

import common
import eval_passk
from engine import Engine
from envs import check_apart, get_task, load_pool, text_key
from model import load_model

torch.set_num_threads(1)
TOKENIZER = tiny_tokenizer()


def screening(guesser, tasks, out, *more, keep=(1, 7)):
    return run("eval_passk.py", "--model", guesser, "--tasks-dir", tasks, "--keep", *keep, "--pool-out", out, "--n", 8,
               "--max-new", 24, *more)


@pytest.fixture(scope="module")
def pool(guesser, tasks, tmp_path_factory):
    """A pool of the 12 problems of `tasks`, of which every third is never right -> its path; .log: what was printed."""
    out = tmp_path_factory.mktemp("pool") / "pool.jsonl"
    got = screening(guesser, tasks, out, "--labbook", out.parent / "labbook.md")
    assert got.returncode == 0, got.stderr
    out.with_suffix(".log").write_text(got.stdout)
    return out


def copied(pool, folder):
    """A copy that may be edited."""
    for path in (pool, f"{pool}.meta.json"):
        shutil.copyfile(path, folder / os.path.basename(path))
    return folder / pool.name


def meta_of(pool):
    return json.loads((pool.parent / f"{pool.name}.meta.json").read_text())


# ----------------------------------------------------------------------------------------------------------------------
# Screening

def test_a_pool_holds_the_problems_with_1_to_7_of_8_right(pool, guesser, tasks):
    """Counted again, with the samples that a screening draws."""
    tokenizer, task = common.load_tokenizer(guesser), get_task("arithmetic", tasks)
    rows = read_rows(tasks / "train.jsonl")
    engine = Engine(load_model(guesser), tokenizer, slots=16)
    result, _ = eval_passk.evaluate(engine, tokenizer, task, rows, 8, 24, step=eval_passk.SCREENING)
    counts = {p["id"]: p["c"] for p in result["problems"]}
    assert read_rows(pool) == [row for row in rows if 1 <= counts[row["id"]] <= 7]
    assert 0 < len(read_rows(pool)) < 12 and not any(row["answer"] == 7 for row in read_rows(pool))
    meta = meta_of(pool)
    assert meta["counts"] == [list(counts.values()).count(c) for c in range(9)]
    kept = [c for c in counts.values() if 1 <= c <= 7]
    assert meta["base_rate"] == pytest.approx(sum(kept) / len(kept) / 8)
    assert meta["base_rate_candidates"] == pytest.approx(sum(counts.values()) / 12 / 8)
    assert get_task("arithmetic", pool.parent).load("pool") == read_rows(pool)   # a task file like any other


def test_meta_says_where_a_pool_comes_from(pool, guesser, tasks):
    meta = meta_of(pool)
    assert meta["sha256"] == common.sha256_file(pool) and meta["model"] == {
        "name": str(guesser), "sha256": common.sha256_model(guesser)}
    assert (meta["seed"], meta["n"], meta["keep"], meta["candidates"]) == (0, 8, [1, 7], 12)
    assert meta["kept"] == len(read_rows(pool)) and meta["extractor"] == "number-1" and meta["max_new"] == 24
    assert {"template_sha256", "git", "time", "headroom"} <= meta.keys()
    assert meta["source"]["sha256"] == common.sha256_file(tasks / "train.jsonl")
    [record], problems = common.read_labbook(pool.parent / "labbook.md")
    assert not problems and record["kind"] == "data" and record["scores"]["sha256"] == meta["sha256"]
    assert record["budget"]["rollouts"] == 12 * 8 + 12 * 32


def test_a_pool_is_written_once(pool, guesser, tasks):
    assert not os.stat(pool).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    before = pool.read_bytes()
    refused(screening(guesser, tasks, pool), "--pool-out", pool, "written once")
    assert pool.read_bytes() == before


def test_base_rate_is_measured_again_by_the_printed_command(pool, tmp_path):
    log = pool.with_suffix(".log").read_text()
    assert log.startswith("headroom: ") and "screened 12 of 12" in log
    command = [line.split() for line in log.splitlines() if line.strip().startswith("python eval_passk.py")][0]
    got = run("eval_passk.py", *command[2:], "--out", tmp_path / "again.json")
    assert got.returncode == 0, got.stderr
    again = json.loads((tmp_path / "again.json").read_text())
    assert [p["id"] for p in again["problems"]] == [row["id"] for row in read_rows(pool)] and again["seed"] == 1


def test_the_printed_command_has_the_settings_of_the_screening_and_is_one_for_a_shell():
    args = eval_passk.get_args(["--keep", "1", "7", "--n", "8", "--pool-out", "my pool.jsonl", "--temperature", "0.7",
                                "--stop", "\n", "--template", "chat.jinja", "--seed", "3", "--adapter", "runs/sft"])
    words = shlex.split(eval_passk.again(args, 12))
    assert words[:2] == ["python", "eval_passk.py"]
    new = eval_passk.get_args(words[2:])
    assert (new.tasks, new.limit, new.seed, new.n, new.k) == ("my pool.jsonl", 12, 4, 8, [1])
    for key in ("model", "adapter", "task", "temperature", "stop", "template", "max_new"):
        assert getattr(new, key) == getattr(args, key)


@pytest.mark.parametrize("at1, at32, word", [(0.96, 1.0, "no room to improve"), (0.0, 0.04, "easier problems"),
                                             (0.95, 1.0, None), (0.01, 0.05, None)])
def test_headroom(at1, at32, word, capsys):
    result = {"pass_at": {"1": at1, "8": at32, "32": at32}, "limit": 60, "n": 32,
              "groups": {"all_right": 0.1, "mixed": 0.2, "all_wrong": 0.7}}
    if word:
        with pytest.raises(common.UserError, match=word) as e:
            eval_passk.check_headroom(result, "tiny on train")
        assert f"pass@1 {at1:.3f}" in str(e.value) and "all wrong 0.70" in str(e.value)
    else:
        eval_passk.check_headroom(result, "tiny on train")


def test_nothing_is_written_when_nothing_is_kept_or_to_learn(guesser, tasks, tmp_path):
    out = tmp_path / "pool.jsonl"
    refused(screening(guesser, tasks, out, "--limit", 2, keep=(8, 8)), "none of 2 candidates", "nothing is written")
    hard = tmp_path / "hard"
    shutil.copytree(tasks, hard)
    write_rows(hard / "train.jsonl", [problem(i, f"{i}?", 7) for i in range(4)])
    refused(screening(guesser, hard, out), "pass@32 0.000", "warm start")
    write_rows(hard / "train.jsonl", [problem(0, "12?", 1), problem(1, "  12 !", 1)])   # held-out: p12, "12?"
    refused(screening(guesser, hard, out), "2 of 2 problems", "heldout-same")
    assert not out.exists() and not (tmp_path / "pool.jsonl.meta.json").exists()


@pytest.mark.parametrize("flags, words", [
    (["--keep", 1, 7], ["--pool-out"]), (["--pool-out", "x.jsonl"], ["--keep"]),
    (["--keep", 7, 1, "--pool-out", "x.jsonl"], ["7 1", "--n 32"]),
    (["--keep", 1, 9, "--pool-out", "x.jsonl", "--n", 8], ["1 9", "--n 8", "1 7"]),
    (["--keep", 1, 7, "--pool-out", "x.jsonl", "--greedy"], ["--greedy"])])
def test_flags_of_a_screening(flags, words):
    refused(run("eval_passk.py", *flags), *words)


def test_problems_are_compared_by_their_normalised_text(tasks):
    task = get_task("arithmetic", tasks)
    check_apart([problem(0, "120?", 1)], "pool", task)
    # other marks, full-width digits, a soft hyphen, the instruction for the answer's form
    for text in ("12?", "12 ?!", "\uff11\uff12", "1\u00ad2?", "12?\nEnd with #### and the answer."):
        with pytest.raises(common.UserError, match="'p0' for one"):
            check_apart([problem(0, text, 1)], "pool", task)
    key = [text_key(problem(0, text, 1)) for text in ("Is 3 + 4 < 9?", "is 3+4<9", "Is 3 - 4 < 9?", "Is 3 + 4 > 9?")]
    assert key[0] == key[1] and len(set(key)) == 3
    assert text_key(problem(0, "A well-known - and old - one", 1)) == "a well known-and old-one"


@pytest.mark.parametrize("script", ["train_grpo.py", "train_rft.py", "train_opd.py"])
def test_a_training_file_that_holds_what_is_evaluated_is_refused(script, guesser, tasks, tmp_path):
    for split in ("heldout-same", "heldout-different"):
        shutil.copy(tasks / f"{split}.jsonl", tmp_path)
    rows = [json.loads(line) for line in (tasks / "train.jsonl").read_text().splitlines()]
    rows[3] = problem(99, "17?", 1)   # one of heldout-different
    write_rows(tmp_path / "train.jsonl", rows)
    refused(run(script, "--model", guesser, "--tasks-dir", tmp_path, "--lr", "1e-3", "--output-dir", tmp_path / "run",
                "--labbook", tmp_path / "lb.md"), "train.jsonl: 1 of 12", "heldout-different", "'p99'")
    assert not (tmp_path / "run").exists() and not (tmp_path / "lb.md").exists()


# ----------------------------------------------------------------------------------------------------------------------
# --pool

def test_a_pool_of_another_model_is_refused_unless_any_pool(pool, guesser, tasks, tmp_path):
    task, other = get_task("arithmetic", tasks), tiny_folder(tmp_path / "other", seed=8)
    assert load_pool(pool, task, TOKENIZER, guesser) == read_rows(pool)
    with pytest.raises(common.UserError, match="screened with .*--any-pool") as e:
        load_pool(pool, task, TOKENIZER, other)
    assert common.sha256_model(guesser)[:12] in str(e.value) and common.sha256_model(other)[:12] in str(e.value)
    assert load_pool(pool, task, TOKENIZER, other, any_pool=True) == read_rows(pool)


@pytest.mark.parametrize("key, value, said", [("task", "gsm8k", "another task .gsm8k, here arithmetic"),
                                              ("extractor", "value-1", "another way to read answers .value-1"),
                                              ("template_sha256", "0" * 64, "another chat template .000000000000,")])
def test_a_pool_of_another_task_or_prompt_is_refused_unless_any_pool(key, value, said, pool, guesser, tasks, tmp_path):
    task, other = get_task("arithmetic", tasks), copied(pool, tmp_path)
    meta = Path(f"{other}.meta.json")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), key: value}))
    with pytest.raises(common.UserError, match=f"{said}.*--any-pool"):
        load_pool(other, task, TOKENIZER, guesser)
    assert load_pool(other, task, TOKENIZER, guesser, any_pool=True) == read_rows(pool)


def test_a_pool_that_was_edited_or_has_no_meta_is_refused_unless_any_pool(pool, guesser, tasks, tmp_path):
    task, edited = get_task("arithmetic", tasks), copied(pool, tmp_path)
    write_rows(edited, read_rows(pool)[:2])
    with pytest.raises(common.UserError, match="edited after the screening"):
        load_pool(edited, task, TOKENIZER, guesser)
    for text in (None, "{", "[]", '{"sha256": "0"}'):
        meta = tmp_path / "pool.jsonl.meta.json"
        meta.unlink() if text is None else meta.write_text(text)
        with pytest.raises(common.UserError, match="no .*meta.json that says how it was screened"):
            load_pool(edited, task, TOKENIZER, guesser)
    assert load_pool(edited, task, TOKENIZER, guesser, any_pool=True) == read_rows(pool)[:2]


def test_an_empty_pool_and_one_with_evaluated_problems_are_always_refused(pool, guesser, tasks, tmp_path):
    task, edited = get_task("arithmetic", tasks), copied(pool, tmp_path)
    write_rows(edited, read_rows(pool) + read_rows(tasks / "heldout-different.jsonl")[:1])
    with pytest.raises(common.UserError, match="heldout-different.*must not be trained on"):
        load_pool(edited, task, TOKENIZER, guesser, any_pool=True)
    write_rows(edited, [])
    with pytest.raises(common.UserError, match="no rows"):
        load_pool(edited, task, TOKENIZER, guesser, any_pool=True)


def train(script, guesser, tasks, folder, *more):
    return run(script, "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", 24, "--warmup", 0,
               "--max-steps", 2, "--labbook", folder.parent / "labbook.md", "--output-dir", folder, *more)


@pytest.mark.parametrize("script", ["train_grpo.py", pytest.param("train_rft.py", marks=pytest.mark.slow),
                                    pytest.param("train_opd.py", marks=pytest.mark.slow)])
def test_a_run_trains_on_its_pool_and_records_it(script, pool, guesser, tasks, tmp_path):
    got = train(script, guesser, tasks, tmp_path / "run", "--pool", pool, "--eval-n", 2, "--limit", 2, "--eval-kl")
    assert got.returncode == 0, got.stderr
    known = {row["id"] for row in read_rows(pool)}
    assert {r["id"] for r in jsonl(tmp_path / "run" / "samples.jsonl")} <= known
    data = json.loads((tmp_path / "run" / "final.json").read_text())["data"]
    assert data[0] == {"path": str(pool), "sha256": meta_of(pool)["sha256"], "rows": len(known)} and len(data) == 3
    kls = {(r["step"], r["split"]): r["kl"] for r in jsonl(tmp_path / "run" / "eval.jsonl")}
    assert all(abs(kl) < 1e-5 if step == 0 else abs(kl) > 1e-4 for (step, _), kl in kls.items()) and len(kls) == 4


def test_a_run_refuses_a_pool_before_it_starts(pool, tasks, tmp_path):
    other = tiny_folder(tmp_path / "other", seed=8)
    refused(train("train_grpo.py", other, tasks, tmp_path / "run", "--pool", pool), "--pool", "--any-pool")
    refused(train("train_grpo.py", other, tasks, tmp_path / "run", "--pool", tmp_path / "none"), tmp_path / "none")
    assert not (tmp_path / "run").exists() and not (tmp_path / "labbook.md").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Evaluations in and out of domain (A10)

def test_other_task_and_its_settings(guesser, tasks, tmp_path):
    """32 samples in domain, 16 out of domain here; the KL to the start is 0 for the start and above 0 for another."""
    far = tmp_path / "far"
    shutil.copytree(tasks, far)
    tokenizer, model = common.load_tokenizer(guesser), load_model(guesser)
    engine, task, other = Engine(model, tokenizer, slots=16), get_task("arithmetic", tasks), get_task("arithmetic", far)

    def evaluated(**more):
        return eval_passk.evaluate_splits(engine, tokenizer, task, 2, 4, 24, 0, **more)
    plain = evaluated()
    assert {k: (v["n"], v["limit"], v["kl"]) for k, v in plain.items()} == {
        "heldout-same": (4, 2, None), "heldout-different": (4, 2, None)}
    both = evaluated(other=other, limit_other=3, n_other=2, start=model)
    assert {k: (v["n"], v["limit"]) for k, v in both.items()} == {
        "heldout-same": (4, 2), "heldout-different": (2, 2), "arithmetic-heldout-same": (2, 3),
        "arithmetic-heldout-different": (2, 3)}
    assert all(abs(v["kl"]) < 1e-5 for v in both.values())
    assert set(both["heldout-different"]["pass_at"]) == {"1", "2"}
    far = evaluated(start=load_model(tiny_folder(tmp_path / "other", seed=8)))
    assert all(v["kl"] > 0.1 for v in far.values())


@pytest.mark.slow
def test_flags_of_the_evaluation(guesser, tasks, tmp_path):
    got = train("train_grpo.py", guesser, tasks, tmp_path / "run", "--eval-n", 4, "--eval-n-other", 2, "--limit", 2,
                "--eval-other", "arithmetic", "--limit-other", 3)
    assert got.returncode == 0, got.stderr
    for r in jsonl(tmp_path / "run" / "eval.jsonl"):   # every answer of every evaluation is kept
        mine = [a for a in jsonl(tmp_path / "run" / "eval_samples.jsonl")
                if (a["step"], a["split"]) == (r["step"], r["split"])]
        assert len(mine) == r["n"] * r["limit"] and sum(a["right"] for a in mine) == sum(p["c"] for p in r["problems"])
    assert {r["split"]: (r["n"], r["limit"]) for r in jsonl(tmp_path / "run" / "eval.jsonl")} == {
        "heldout-same": (4, 2), "heldout-different": (2, 2), "arithmetic-heldout-same": (2, 3),
        "arithmetic-heldout-different": (2, 3)}
