"""
eval_passk.py as a user runs it: the JSON object of the contract, what it refuses, and that its numbers follow from the
samples it wrote. The model is random and tiny, trained for a moment so that some answers are right (conftest.py).
"""
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from helpers import EOS, problem, read_rows, run_script, tiny_folder, tiny_model, tiny_tokenizer, write_rows
from launch import refused, run

import common
import envs
import eval_passk
from engine import Engine
from model import load_model, save_model
from train_sft import as_batch

torch.set_num_threads(1)
KEYS = """model model_sha256 task split n limit temperature greedy max_new seed label template_sha256 extractor pass_at
lenient_pass_at se ci95 mean_length mean_length_right mean_length_wrong median_length_right length_gap truncated entropy
tokens_per_solved distinct_answers groups behaviour wall_s problems""".split()


def evaluate(folder, out, *args):
    """eval_passk.py -> (returncode, stdout and stderr, the JSON object or None)."""
    r = run("eval_passk.py", "--model", folder, "--device", "cpu", "--max-new", 24, "--out", out, *args)
    return r, json.loads(out.read_text()) if out.exists() else None


# ----------------------------------------------------------------------------------------------------------------------
# The JSON object

@pytest.fixture(scope="module")
def done(guesser, tasks, tmp_path_factory):
    """One evaluation of 4 problems x 8, which several tests look at."""
    base = tmp_path_factory.mktemp("done")
    r, result = evaluate(guesser, base / "deep" / "out.json", "--tasks-dir", tasks, "--n", 8, "--k", 1, 2, 8, "--label",
                         "the guesser", "--labbook", base / "labbook.md", "--notes", "a try", "--seed", 5)
    assert r.returncode == 0, r.stderr
    return r, result, read_rows(base / "deep" / "out.json.samples.jsonl"), base


def test_every_key_of_the_contract_is_there(done, guesser):
    _, result, _, _ = done
    assert [k for k in KEYS if k not in result] == []
    want = {"task": "arithmetic", "split": "heldout-same", "n": 8, "limit": 4, "temperature": 1.0, "greedy": False,
            "max_new": 24, "seed": 5, "label": "the guesser"}
    assert {k: result[k] for k in want} == want
    assert result["model"] == str(guesser) and result["extractor"]
    assert result["model_sha256"] == common.sha256_file(guesser / "model.safetensors")
    assert list(result["pass_at"]) == list(result["se"]) == list(result["lenient_pass_at"]) == ["1", "2", "8"]
    assert all(low <= result["pass_at"][k] <= high for k, (low, high) in result["ci95"].items())
    assert set(result["groups"]) == {"all_right", "mixed", "all_wrong"}
    assert sum(result["groups"].values()) == pytest.approx(1)
    for p in result["problems"]:
        assert {"id", "c", "n", "lenient_c", "lengths", "correct", "answers"} <= set(p)
        assert len(p["lengths"]) == len(p["correct"]) == len(p["answers"]) == p["n"] == 8
        assert sum(p["correct"]) == p["c"] and p["lenient_c"] >= p["c"]


def test_the_numbers_follow_from_the_samples(done, tasks):
    """Graded again from the texts on disk, by hand: c, pass@k, lengths, truncation, the samples' ids."""
    _, result, samples, _ = done
    tokenizer, rows = tiny_tokenizer(), {r["id"]: r for r in read_rows(tasks / "heldout-same.jsonl")}
    assert len(samples) == 32 and len({(s["id"], s["sample"]) for s in samples}) == 32
    right, length, cut = {}, {}, 0
    for s in samples:
        row = rows[s["id"]]
        prompt = common.encode_prompt(tokenizer, row["prompt"])
        assert s["ids"][:s["prompt_length"]] == prompt
        answer = s["ids"][s["prompt_length"]:]
        assert tokenizer.decode(answer, skip_special_tokens=True) == s["text"]
        assert (answer[-1] == EOS) == (s["finish"] == "eos") and len(answer) <= 24
        cut += s["finish"] == "length"
        want = s["finish"] != "length" and common.strict_answer(s["text"]) == row["answer"]
        assert s["right"] == want and s["lenient"] >= s["right"]
        right.setdefault(s["id"], []).append(want)
        length.setdefault(s["id"], []).append(len(answer))
    assert [p["id"] for p in result["problems"]] == list(rows)
    for p in result["problems"]:
        assert p["correct"] == right[p["id"]] and p["lengths"] == length[p["id"]]
        assert p["lenient_c"] == sum(s["lenient"] for s in samples if s["id"] == p["id"])
    counts = [sum(x) for x in right.values()]
    assert 0 < sum(counts) < 32   # else this test shows little
    for k in (1, 2, 8):
        each = [1 - math.comb(8 - c, k) / math.comb(8, k) for c in counts]
        assert result["pass_at"][str(k)] == pytest.approx(sum(each) / 4)
        assert result["se"][str(k)] == pytest.approx(statistics.stdev(each) / 2)
    flat = [(w, n) for i in right for w, n in zip(right[i], length[i])]
    assert result["mean_length"] == pytest.approx(statistics.mean(n for _, n in flat))
    assert result["mean_length_right"] == pytest.approx(statistics.mean(n for w, n in flat if w))
    assert result["mean_length_wrong"] == pytest.approx(statistics.mean(n for w, n in flat if not w))
    assert result["truncated"] == cut / 32
    assert result["tokens_per_solved"] == pytest.approx(sum(n for _, n in flat) / sum(counts))
    gaps = [statistics.mean(n for w, n in zip(right[i], length[i]) if w)
            - statistics.mean(n for w, n in zip(right[i], length[i]) if not w)
            for i in right if 0 < sum(right[i]) < 8]
    assert result["length_gap"] == pytest.approx(statistics.mean(gaps))
    assert result["distinct_answers"] == pytest.approx(statistics.mean(
        len(set(p["answers"]) - {None}) for p in result["problems"]))
    assert any(len({tuple(s["ids"]) for s in samples if s["id"] == i}) > 1 for i in rows)   # X50: samples differ


def test_the_table_says_what_the_file_says(done):
    r, result, _, base = done
    assert "the guesser  arithmetic heldout-same: 4 problems x 8 samples" in r.stdout
    for k, v in result["pass_at"].items():
        assert any(line.split()[:2] == [k, f"{v:.3f}"] for line in r.stdout.split("\n"))
    assert str(base / "deep" / "out.json") in r.stdout


def test_the_labbook_has_one_record_of_the_evaluation(done):
    _, result, samples, base = done
    records, problems = common.read_labbook(base / "labbook.md")
    assert problems == [] and len(records) == 1
    r = records[0]
    for key in ("kind prev run_id parent time script arm task model data seed config budget losses scores status git "
                "versions device notes").split():
        assert key in r, key
    assert r["kind"] == "eval" and r["script"] == "eval_passk" and r["status"] == "ok" and r["seed"] == 5
    assert r["notes"] == "a try" and r["scores"]["pass_at"] == result["pass_at"] and r["config"]["temperature"] == 1.0
    assert r["model"]["sha256"] == result["model_sha256"] and r["data"][0]["rows"] == 4
    assert r["budget"]["rollouts"] == 32
    assert r["budget"]["tokens_sampled"] == sum(len(s["ids"]) - s["prompt_length"] for s in samples)
    assert "problems" not in r["scores"]   # a line that a person can still scroll past


def without_times(result):
    return {k: v for k, v in result.items() if not k.endswith("_s")}


def test_the_result_does_not_hang_on_slots_or_limit(guesser, tasks):
    """Samples are drawn from (seed, prompt id, sample, position): the layout of the batch moves nothing (X17)."""
    tokenizer, task = common.load_tokenizer(guesser), envs.Arithmetic(tasks)
    rows = task.load("heldout-different")

    def result(slots, rows, n=6, seed=0):
        model = load_model(guesser)
        return without_times(eval_passk.evaluate(Engine(model, tokenizer, slots=slots), tokenizer, task, rows, n, 24,
                                                 seed=seed)[0])

    one = result(1, rows)
    for slots in (5, 64):
        got = result(slots, rows)
        assert got["problems"] == one["problems"] and got["pass_at"] == one["pass_at"]
        assert got["entropy"] == pytest.approx(one["entropy"], abs=1e-5)
    assert result(64, rows[::-1])["problems"] == one["problems"][::-1]
    assert result(64, rows[:2])["problems"] == one["problems"][:2]
    fewer = result(64, rows, n=3)["problems"]   # the first samples are the same ones
    assert [p["correct"] for p in fewer] == [p["correct"][:3] for p in one["problems"]]
    assert result(64, rows, seed=1)["problems"] != one["problems"]


def test_k_defaults_to_powers_of_two_and_greedy_is_one_sample(guesser, tasks, tmp_path):
    tokenizer, task = common.load_tokenizer(guesser), envs.Arithmetic(tasks)
    engine, rows = Engine(load_model(guesser), tokenizer), task.load("heldout-same")
    result, _ = eval_passk.evaluate(engine, tokenizer, task, rows, 12, 24)
    assert list(result["pass_at"]) == ["1", "2", "4", "8"]
    for slots in (1, 64):
        engine = Engine(load_model(guesser), tokenizer, slots=slots)
        greedy, samples = eval_passk.evaluate(engine, tokenizer, task, rows, 12, 24, greedy=True)
        assert greedy["greedy"] and greedy["n"] == 1 and greedy["temperature"] == 0 and list(greedy["pass_at"]) == ["1"]
        assert [p["n"] for p in greedy["problems"]] == [1] * 4
        model = load_model(guesser)
        for s in samples:   # each token is the likeliest one of a fresh forward pass
            ids = torch.tensor(s["ids"])
            with torch.no_grad():
                best = (model(ids, [len(ids)]) @ model.head_weight.t()).argmax(-1)
            assert best[s["prompt_length"] - 1:-1].tolist() == s["ids"][s["prompt_length"]:]
    r, out = evaluate(guesser, tmp_path / "g.json", "--tasks-dir", tasks, "--greedy", "--limit", 3)
    assert r.returncode == 0 and out["greedy"] and out["n"] == 1 and out["limit"] == 3 and len(out["problems"]) == 3


def test_samples_are_drawn_at_the_temperature_that_is_recorded(guesser, tasks, tmp_path):
    """T80: the sampler's log-probs and entropy are those of a fresh forward pass at that temperature, and not at 1."""
    r, result = evaluate(guesser, tmp_path / "out.json", "--tasks-dir", tasks, "--n", 8, "--temperature", 0.6)
    assert r.returncode == 0, r.stderr
    samples, model = read_rows(tmp_path / "out.json.samples.jsonl"), load_model(guesser)
    ids, mask, length = as_batch([(s["ids"][:s["prompt_length"]], s["ids"][s["prompt_length"]:]) for s in samples])

    def means(temperature):
        both = common.score(model, SimpleNamespace(ids=ids, mask=mask, length=length), temperature)
        return [x[mask[:, 1:]].mean().item() for x in both]
    logp, entropy = means(0.6)
    assert result["temperature"] == 0.6 and abs(logp - means(1.0)[0]) > 0.02
    assert result["mean_logp"] == pytest.approx(logp, abs=1e-4)
    assert result["entropy"] == pytest.approx(entropy, abs=1e-4)
    tokenizer, task = common.load_tokenizer(guesser), envs.Arithmetic(tasks)
    again, _ = eval_passk.evaluate(Engine(model, tokenizer), tokenizer, task, task.load("heldout-same"), 8, 24,
                                   temperature=0.6, start=model)
    assert again["problems"] == result["problems"] and abs(again["kl"]) < 1e-5   # to itself


@pytest.mark.parametrize("script", ["train_sft", "train_grpo", "train_rft", "train_opd"])
def test_stop_strings_end_the_answers_of_a_training_scripts_evaluation(script, guesser, tasks, tmp_path):
    """X28. What the model writes is `#### 1` or `#### 2`; stopped before the number nothing is right, nor greedily."""
    row = {"prompt": problem(0, "100?", 1)["prompt"], "completion": [{"role": "assistant", "content": "#### 1"}]}
    data = ["--data", write_rows(tmp_path / "sft.jsonl", [row])] if script == "train_sft" else []
    got = run(f"{script}.py", *data, "--model", guesser, "--tasks-dir", tasks, "--max-steps", 0, "--eval-n", 4, "--lr",
              "1e-3", "--max-new", 24, "--stop", "####", "--labbook", tmp_path / "labbook.md", "--output-dir",
              tmp_path / "run")
    assert got.returncode == 0, got.stderr
    tokenizer, task = common.load_tokenizer(guesser), envs.Arithmetic(tasks)
    free = eval_passk.evaluate_splits(Engine(load_model(guesser), tokenizer), tokenizer, task, 60, 4, 24, 0)
    stopped, free = read_rows(tmp_path / "run" / "eval.jsonl")[0], free["heldout-same"]
    assert [(r["pass_at"]["1"] > 0, r["greedy_pass"] > 0) for r in (stopped, free)] == [(False, False), (True, True)]
    assert stopped["behaviour"]["finish"]["stop"] > 8   # of 16


def test_truncated_answers_are_wrong_and_counted(guesser, tasks):
    """A marked answer whose end was cut off does not count: `#### 1` may have been on its way to 15."""
    tokenizer, task = common.load_tokenizer(guesser), envs.Arithmetic(tasks)
    rows = task.load("heldout-same")
    result, samples = eval_passk.evaluate(Engine(load_model(guesser), tokenizer), tokenizer, task, rows, 16, 6)
    cut = [s for s in samples if s["finish"] == "length"]
    assert any(s["text"].startswith("#### ") and len(s["text"]) == 6 for s in cut)   # six tokens: no room for the end
    assert result["truncated"] == len(cut) / len(samples) > 0.9
    assert not any(s["right"] or s["lenient"] for s in cut) and result["pass_at"]["1"] == 0
    assert result["tokens_per_solved"] is None and result["mean_length_right"] is None and result["length_gap"] is None


@pytest.mark.parametrize("right", [True, False])
def test_a_model_that_is_always_right_and_one_that_never_is(guesser, tasks, right):
    """The fields that need a problem of both kinds are null, not nan."""
    tokenizer, task = common.load_tokenizer(guesser), envs.Arithmetic(tasks)
    task.grade = lambda text, row: {"right": right, "lenient": right, "answer": "1"}
    result, _ = eval_passk.evaluate(Engine(load_model(guesser), tokenizer), tokenizer, task, task.load("heldout-same"),
                                    4, 200)
    json.dumps(result, allow_nan=False)
    assert result["truncated"] == 0 and result["length_gap"] is None and result["pass_at"]["4"] == float(right)
    assert result["groups"] == {"all_right": float(right), "mixed": 0, "all_wrong": float(not right)}
    assert (result["mean_length_right"] is None) != right and (result["mean_length_wrong"] is None) == right


def test_the_entropy_of_a_uniform_model(tasks):
    model, tokenizer, task = tiny_model(scale=0.0), tiny_tokenizer(), envs.Arithmetic(tasks)
    result, _ = eval_passk.evaluate(Engine(model, tokenizer), tokenizer, task, task.load("heldout-same"), 4, 20)
    assert result["entropy"] == pytest.approx(math.log(261), abs=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused

@pytest.mark.parametrize("args, said", [
    (["--n", 4, "--k", 8], ["--k 8", "--n is 4"]),
    (["--greedy", "--k", 2], ["--k 2", "--n is 1"]),
    (["--n", 0], ["--n", "0 is out of range"]), (["--n", "many"], ["--n", "'many'"]),
    (["--temperature", 0], ["--temperature", "0 is out of range"]), (["--temperature", "nan"], ["nan is out of range"]),
    (["--max-new", -1], ["--max-new", "-1"]), (["--seed", -1], ["--seed", "-1"]),
    (["--seed", 2 ** 70], ["--seed", "out of range"]), (["--k", 0], ["--k", "0"]),
    (["--tasks", "x.jsonl", "--split", "y"], ["--tasks", "--split"]), (["--spl", "y"], ["--spl"]),
    (["--device", "abacus"], ["--device abacus"]), (["--task", "chess"], ["--task chess", "arithmetic"]),
    (["--model", "no/such/model"], ["no/such/model", "no such folder"]),
])
def test_wrong_flags(capsys, monkeypatch, args, said):
    """In this process: what argparse or the first lines of the script refuse needs no model."""
    try:
        parsed = eval_passk.get_args([str(a) for a in args])
        common.pick_device(parsed.device)
        eval_passk.find_folder(parsed.model)
        envs.get_task(parsed.task)
        raise AssertionError("accepted")
    except SystemExit as e:
        assert e.code == 2
        text = capsys.readouterr().err
    except common.UserError as e:
        text = str(e) + "\n"
    assert text.count("\n") == 1 and all(s in text for s in said), text


BAD = {   # name of the file: (its text, what the line must say)
    "malformed.jsonl": (json.dumps(problem(0, "?", 1)) + "\n{\"id\": 1\n", "malformed.jsonl:2: "),
    "no-number.jsonl": (json.dumps(problem(0, "?", "one")) + "\n", "no-number.jsonl:1: `answer` 'one' is not a number"),
    "empty.jsonl": ("", "empty.jsonl: no rows"),
    "double.jsonl": ("".join(json.dumps(problem(0, text, 1)) + "\n" for text in "?!"), "'p0' stands on two rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_task_files_in_one_line(guesser, tmp_path, name):
    (tmp_path / name).write_text(BAD[name][0])
    r, result = evaluate(guesser, tmp_path / "out.json", "--tasks", tmp_path / name, "--labbook", tmp_path / "book.md")
    refused(r, BAD[name][1], tmp_path / name)
    assert result is None and sorted(p.name for p in tmp_path.iterdir()) == [name]   # nothing half written


def test_a_missing_split_names_what_is_there(tasks):
    with pytest.raises(common.UserError) as e:
        envs.Arithmetic(tasks).path("heldout-nowhere")
    for text in ("heldout-nowhere.jsonl", "train", "heldout-same", "heldout-different", "prepare.py"):
        assert text in str(e.value)
    with pytest.raises(common.UserError, match="holds nothing"):
        envs.GSM8K(tasks / "none").load("test")


def test_an_output_that_exists_is_refused_before_any_work(capsys, tmp_path):
    for name in ("out.json", "out.json.samples.jsonl"):   # samples would be added to those of another evaluation
        path = tmp_path / name
        path.write_text("mine")
        with pytest.raises(SystemExit) as e:
            eval_passk.get_args(["--out", str(tmp_path / "out.json")])
        assert e.value.code == 2 and "exists" in capsys.readouterr().err and path.read_text() == "mine"
        path.unlink()


@pytest.mark.parametrize("flag, place", [("--labbook", "no/such/book.md"), ("--out", "file/out.json")])
def test_places_that_cannot_be_written_are_refused_before_any_work(guesser, tasks, tmp_path, flag, place):
    (tmp_path / "file").write_text("x")
    args = {"--out": tmp_path / "out.json", "--labbook": tmp_path / "book.md"} | {flag: tmp_path / place}
    r = run("eval_passk.py", "--model", guesser, "--tasks-dir", tasks, "--n", 2, "--max-new", 4,
            *[x for pair in args.items() for x in pair])
    refused(r, flag, tmp_path / place)
    assert "pass@k" not in r.stdout and sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path):
    """Ids beyond the embedding: the tokenizer is another model's."""
    save_model(tiny_model(vocab_size=100), tmp_path / "m", tiny_tokenizer())
    odd = write_rows(tmp_path / "odd.jsonl", [problem(0, "\u00e9", 1)])
    r, _ = evaluate(tmp_path / "m", tmp_path / "out.json", "--tasks", odd, "--n", 2)
    refused(r, "vocab_size 100", "tokenizer and weights do not belong together")


def test_prompts_that_leave_no_room_are_refused(tmp_path, tasks):
    """X12: refused with the numbers, never cut."""
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=32)
    long = write_rows(tmp_path / "long.jsonl", [problem(0, "word " * 30, 1)])
    r, result = evaluate(folder, tmp_path / "out.json", "--tasks", long, "--n", 2)
    refused(r, "32")
    assert result is None


def test_the_default_command_on_the_embedded_model(tmp_path):
    """No flag but small sizes: data/tiny, the generated problems, the first held-out split. A process of its own."""
    out = tmp_path / "out.json"
    r = run_script("eval_passk.py", "--n", 4, "--limit", 4, "--max-new", 128, "--out", out, "--device", "cpu")
    assert r.returncode == 0, r.stderr
    result = json.loads(out.read_text())
    assert (result["model"], result["task"], result["split"]) == ("data/tiny", "arithmetic", "heldout-same")
    assert result["behaviour"]["parsable"] > 0.5 and list(result["pass_at"]) == ["1", "2", "4"]
