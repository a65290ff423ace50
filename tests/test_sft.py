"""
train_sft.py: which tokens of a row are trained (X3 to X6, X10; more of them in test_common.py), rows that are dropped
or refused, and the two checkpoints, lowest validation and last.
"""
import json
import os
import signal

import pytest
import torch
from helpers import EOS, ROOT, read_rows, tiny_model, tiny_tokenizer, write_rows
from launch import metrics, refused, run, start, weights
from safetensors.torch import load_file

import common
import train_sft as sft

torch.set_num_threads(1)


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


CHAT = [{"role": "system", "content": "Be brief."}, user("2 + 3?"), says("5"), user("And 4 + 4?"), says("It is 8.")]


def trained(tokenizer, row):
    """A row as text, trained tokens between [[ and ]]."""
    ids, mask, length = sft.as_batch([sft.encode_row(tokenizer, row, EOS)])
    return common.show_row(tokenizer, ids[0, :length[0]], mask[0])


# ----------------------------------------------------------------------------------------------------------------------
# What is trained

def test_every_assistant_turn_of_a_chat_is_trained_and_nothing_else():
    t = tiny_tokenizer()
    assert trained(t, {"messages": CHAT}) == (
        "<|system|>Be brief.<|end|><|user|>2 + 3?<|end|><|assistant|>[[5<|end|>]]"
        "<|user|>And 4 + 4?<|end|><|assistant|>[[It is 8.<|end|>]]")
    # what comes after the last answer scores nothing
    assert trained(t, {"messages": CHAT + [user("Thanks.")]}) == trained(t, {"messages": CHAT})


def test_an_answer_inside_a_prompt_is_read_and_not_trained():
    """X10, and the last turn alone is what is trained of a textbook row."""
    t = tiny_tokenizer()
    assert trained(t, {"prompt": CHAT[:-1], "completion": CHAT[-1:]}) == (
        "<|system|>Be brief.<|end|><|user|>2 + 3?<|end|><|assistant|>5<|end|>"
        "<|user|>And 4 + 4?<|end|><|assistant|>[[It is 8.<|end|>]]")


@pytest.mark.parametrize("name", ["ours", "data/tiny"])
def test_a_chat_of_one_turn_is_the_textbook_row_and_its_prompt_the_samplers(name):
    """X6: the prompt's ids are those that every script samples from."""
    t = tiny_tokenizer() if name == "ours" else common.load_tokenizer(ROOT / name)
    book = {"prompt": CHAT[:2], "completion": [says("2 + 3 = 5\n#### 5")]}
    row = sft.encode_row(t, book, t.eos_token_id)
    assert row == sft.encode_row(t, {"messages": CHAT[:2] + book["completion"]}, t.eos_token_id) and len(row) == 2
    assert row[0] == common.encode_prompt(t, CHAT[:2])
    assert row[1] == common.encode_completion(t, "2 + 3 = 5\n#### 5", t.eos_token_id)
    # and a chat's ids are the template's own, up to what it writes behind the last end token
    ids = sum(sft.encode_row(t, {"messages": CHAT}, t.eos_token_id), [])
    whole = t(t.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    assert whole[:len(ids)] == ids and t.decode(whole[len(ids):]).strip() == ""


def test_the_end_of_each_turn_is_trained_where_padding_is_the_same_token():
    """X3: pad == eos; a gradient reaches every end token, and none the padding, nor the users' turns."""
    t, model = tiny_tokenizer(), tiny_model(scale=3.0)
    t.pad_token = t.eos_token
    ids, mask, length = sft.as_batch([sft.encode_row(t, {"messages": m}, EOS) for m in (CHAT, CHAT[1:3])])
    assert [int((ids[b][mask[b]] == EOS).sum()) for b in range(2)] == [2, 1] and not mask[1, length[1]:].any()
    p = common.pack_rows(ids, mask, length, [0, 1], model.device)
    seen = {}

    def fn(logp, entropy, at):
        loss, sums = sft.sft_loss(logp, entropy, at, len(p.targets))
        seen["g"] = torch.autograd.grad(loss, logp, retain_graph=True)[0]
        return loss, sums
    common.head_backward(model(p.ids, p.lengths)[p.where], model.head_weight, p.targets, fn)
    assert int((p.targets == EOS).sum()) == 3 and (seen["g"][p.targets == EOS] != 0).all()
    assert len(p.targets) == int(mask.sum()) == len("5") + len("It is 8.") + len("5") + 3   # bytes, and three ends


def test_the_loss_of_a_chat_is_that_of_its_answers_each_behind_its_own_past():
    """X5: the same sums as two textbook rows, one a turn: what stands between them moves nothing by itself."""
    t, model = tiny_tokenizer(), tiny_model(scale=3.0)

    def loss(*rows):
        batch = sft.as_batch([sft.encode_row(t, r, EOS) for r in rows])
        p = common.pack_rows(*batch, range(len(rows)), model.device)
        return common.head_backward(model(p.ids, p.lengths)[p.where].detach(), model.head_weight, p.targets,
                                    lambda logp, entropy, at: sft.sft_loss(logp, entropy, at, 1))[1]["loss"].item()
    turns = loss({"prompt": CHAT[:2], "completion": CHAT[2:3]}, {"prompt": CHAT[:4], "completion": CHAT[4:]})
    assert loss({"messages": CHAT}) == pytest.approx(turns, rel=1e-5) and turns > 10
    other = CHAT[:3] + [user("And 4 + 5?")] + CHAT[4:]
    assert loss({"messages": other}) != loss({"messages": CHAT})


THINKS = ("{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}<|assistant|>"
          "{{ m['content'].split('</think>')[-1] }}{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}<|end|>"
          "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")   # as Qwen3's: earlier thoughts go


def test_a_template_that_rewrites_earlier_turns_is_refused():
    t = tiny_tokenizer()
    t.chat_template = THINKS
    thought = says("<think>5 I say</think>5")
    with pytest.raises(ValueError, match=r"does not keep what came before message 3: '<think>5' becomes '5<\|end\|>"):
        sft.encode_row(t, {"messages": [user("2 + 3?"), thought, user("And 4 + 4?"), says("8")]}, EOS)
    assert trained(t, {"messages": [user("2 + 3?"), thought]}).endswith("[[<think>5 I say</think>5<|end|>]]")
    # another end token than the template's is such a case too
    with pytest.raises(ValueError, match="becomes"):
        sft.encode_row(tiny_tokenizer(), {"messages": CHAT}, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Rows that are refused or dropped (X4)

BOOK = {"prompt": [user("5?")], "completion": [says("#### 2")]}


@pytest.mark.parametrize("row, reason", [
    ({"messages": [user("5?")]}, "needs an assistant turn"), ({"messages": [user("5?"), says(" \n")]}, "none of them"),
    ({"messages": [says("5"), user("5?"), says("5")]}, "none the first"), ({"messages": []}, "`messages` must be"),
    ({"messages": [user("5?"), says("5")], **BOOK}, "either `messages` or"), ({}, "prompt is missing"),
    (BOOK | {"completion": [says("a"), says("b")]}, "more than one message"),
    (BOOK | {"completion": [says("")]}, "nothing to train on"),
    (BOOK | {"completion": [user("#### 2")]}, "of role 'user'")])
def test_a_row_without_anything_to_train_on_is_refused_with_its_line(row, reason, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [BOOK, row])
    with pytest.raises(common.UserError, match=f":2: .*{reason}"):
        common.read_rows(path, sft.check_row)


def flags(folder, guesser, tasks, rows, *more):
    data = write_rows(folder.parent / f"{folder.name}.jsonl", rows)
    return ["train_sft.py", "--data", data, "--model", guesser, "--tasks-dir", tasks, "--lr", "1e-3", "--eval-n", 0,
            "--rows-per-step", 4, "--labbook", folder.parent / "labbook.md", "--output-dir", folder, *more]


def succeed(*command):
    got = run(*command)
    assert got.returncode == 0, got.stderr[-2000:]
    return got


def test_dropped_rows_are_counted_in_the_record(guesser, tasks, tmp_path):
    rows = [BOOK, {"messages": [user("x" * 60), says("5")]}, BOOK | {"completion": [says("#### 1")]},
            {"messages": [user("1?"), says("ok"), user("2?"), says("no")]}]
    got = succeed(*flags(tmp_path / "run", guesser, tasks, rows, "--max-length", 40, "--min-answer", 3, "--max-steps",
                         1))
    notes = json.loads((tmp_path / "run" / "final.json").read_text())["notes"]
    for words in ("dropped 1 of 4 rows, longer than 40 tokens", "dropped 1 of 4 rows, with an answer under 3 tokens"):
        assert words in got.stdout and words in notes
    assert "; 2 rows, 4 a step" in got.stdout
    refused(run(*flags(tmp_path / "none", guesser, tasks, rows, "--min-answer", 30)), "--min-answer 30",
            "no row is left")
    refused(run(*flags(tmp_path / "long", guesser, tasks, rows, "--max-length", 5)), "every row is longer than 5")


def test_a_bad_chat_is_refused_with_its_row_before_anything_is_written(guesser, tasks, tmp_path):
    (tmp_path / "thinks.jinja").write_text(THINKS)
    rows = [BOOK, {"messages": [user("2?"), says("<think>a</think>5"), user("3?"), says("8")]}]
    refused(run(*flags(tmp_path / "run", guesser, tasks, rows, "--template", tmp_path / "thinks.jinja")), "row 2",
            "does not keep")
    assert not (tmp_path / "run").exists()


def test_half_a_surrogate_pair_and_a_role_that_the_template_refuses_are_named_with_their_row(guesser, tasks, tmp_path):
    path = tmp_path / "rows.jsonl"
    for text in ('{"messages": [{"role": "user", "content": "a\\ud800"}, {"role": "assistant", "content": "b"}]}',
                 '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\udfffb"}]}'):
        path.write_text(json.dumps(BOOK) + "\n" + text + "\n")
        with pytest.raises(common.UserError, match=":2: .*half of a surrogate pair"):
            common.read_rows(path, sft.check_row)
    (tmp_path / "roles.jinja").write_text("{% for m in messages %}{% if m.role == 'tool' %}"
                                          "{{ raise_exception('no tool') }}{% endif %}{{ m.content }}{% endfor %}")
    rows = [BOOK, {"messages": [{"role": "tool", "content": "2?"}, says("5")]}]
    refused(run(*flags(tmp_path / "run", guesser, tasks, rows, "--template", tmp_path / "roles.jinja")), "row 2",
            "no tool")


def test_an_empty_valid_is_refused(guesser, tasks, tmp_path):
    refused(run(*flags(tmp_path / "run", guesser, tasks, [BOOK], "--valid", "")), "--valid is empty")
    refused(run(*flags(tmp_path / "run", guesser, tasks, [BOOK], "--epochs", "1e308")), "--epochs: 1e308")


@pytest.mark.parametrize("flag", ["--data", "--valid"])
def test_a_problem_of_the_held_out_files_is_not_trained_on(flag, guesser, tasks, tmp_path):
    asked = read_rows(tasks / "heldout-same.jsonl")[0]["prompt"]
    for name, row in (("book", {"prompt": asked, "completion": [says("#### 1")]}),
                      ("chat", {"messages": [user("A word first."), says("Yes?"), *asked, says("#### 1")]})):
        both = write_rows(tmp_path / f"{name}.jsonl", [BOOK, row])
        refused(run(*flags(tmp_path / "run", guesser, tasks, [BOOK]), flag, both), both, "heldout-same", "'row 2'")
        assert not (tmp_path / "run").exists()


def test_chats_and_textbook_rows_of_one_turn_make_the_same_run(guesser, tasks, tmp_path):
    book = [{"prompt": [user(f"{i}?")], "completion": [says(f"#### {i % 3}")]} for i in range(8)]
    chats = [{"messages": r["prompt"] + r["completion"]} for r in book]
    for name, rows in (("book", book), ("chats", chats)):
        succeed(*flags(tmp_path / name, guesser, tasks, rows, "--max-steps", 3))
    assert weights(tmp_path / "book") == weights(tmp_path / "chats")


def test_micro_batch_tokens_change_nothing_but_memory(guesser, tasks, tmp_path):
    """X21: a backward pass for each of 4 rows, and one for all; the validation's denominator likewise."""
    train, valid = overfit(tmp_path)
    for name, more in (("whole", []), ("split", ["--micro-batch-tokens", 1])):
        succeed(*flags(tmp_path / name, guesser, tasks, train, "--valid", valid, "--max-steps", 1, "--lr", 0, *more))
    whole, split = metrics(tmp_path / "whole")[0], metrics(tmp_path / "split")[0]
    for key in ("loss", "valid_loss", "entropy", "grad_norm"):
        assert split[key] == pytest.approx(whole[key], rel=1e-5) and whole[key] > 1e-3


def test_schedule_by_hand(guesser, tasks, tmp_path):
    """X28: the learning rate that each step was made with."""
    train, _ = overfit(tmp_path)
    succeed(*flags(tmp_path / "run", guesser, tasks, train, "--max-steps", 4, "--warmup", 0, "--schedule", "linear"))
    assert [r["lr"] for r in metrics(tmp_path / "run")] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_padding_by_hand():
    """Steps of 2 rows in the order of the seed: each step's longest row times 2, less what is used."""
    rows = [([1] * a, [2] * b) for a, b in ((1, 1), (3, 5), (2, 2), (4, 2))]
    args = type("Args", (), {"rows_per_step": 4, "seed": 0})
    assert sft.padding(rows, args) == pytest.approx(1 - 20 / 32)
    args.rows_per_step = 1
    assert sft.padding(rows, args) == 0


# ----------------------------------------------------------------------------------------------------------------------
# The lowest validation and the last

def overfit(tmp_path):
    """Training rows with an answer that the validation rows never give: their loss falls, then rises."""
    train = [{"prompt": [user(f"{i}?")], "completion": [says("#### 1" if i % 4 else "so 7\n#### 7")]} for i in range(8)]
    valid = [{"prompt": [user(f"{i}?")], "completion": [says("#### 1" if i % 2 else "ok\n#### 1")]} for i in range(6)]
    return train, write_rows(tmp_path / "valid.jsonl", valid)


def test_lowest_and_last_are_both_kept(guesser, tasks, tmp_path):
    train, valid = overfit(tmp_path)
    folder = tmp_path / "run"
    got = succeed(*flags(folder, guesser, tasks, train, "--valid", valid, "--valid-every", 2, "--max-steps", 12,
                         "--save-every", 4, "--schedule", "constant"))
    losses = {r["step"]: r["valid_loss"] for r in metrics(folder) if "valid_loss" in r}
    assert list(losses) == [2, 4, 6, 8, 10, 12]
    low = min(losses, key=losses.get)
    final = json.loads((folder / "final.json").read_text())["losses"]
    assert final["valid_lowest_step"] == low < 12 and final["valid_lowest"] == losses[low]
    assert final["valid"] == losses[12] > losses[low]
    assert os.readlink(folder / "best") == f"best-{low:06d}"
    assert sorted(p.name for p in folder.glob("best*")) == ["best", f"best-{low:06d}"]
    assert f"lowest {losses[low]:.4f} at step {low} (best/)" in got.stdout.splitlines()[-1]
    # both are models: X38, they differ from the start and from each other
    found = [load_file(p / "model.safetensors") for p in (guesser, folder / "best", folder / "checkpoint")]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert found[a].keys() == found[b].keys() and any(not torch.equal(found[a][k], found[b][k]) for k in found[a])
    # best/ is what a run to that step leaves; and it serves as a start
    other = tmp_path / "short"
    succeed(*flags(other, guesser, tasks, train, "--max-steps", low, "--schedule", "constant"))
    assert (other / "checkpoint" / "model.safetensors").read_bytes() == (folder / "best" / "model.safetensors"
                                                                         ).read_bytes()
    succeed(*flags(tmp_path / "next", folder / "best", tasks, train, "--max-steps", 1))


def test_without_validation_there_is_no_best_and_the_flag_is_refused(guesser, tasks, tmp_path):
    train, _ = overfit(tmp_path)
    succeed(*flags(tmp_path / "run", guesser, tasks, train, "--max-steps", 1))
    assert not list((tmp_path / "run").glob("best*"))
    assert json.loads((tmp_path / "run" / "final.json").read_text())["losses"].keys() == {"train", "valid"}
    refused(run(*flags(tmp_path / "x", guesser, tasks, train, "--valid-every", 3)), "--valid-every", "--valid")


def test_best_survives_a_kill_and_the_resumed_run_is_the_whole_one(guesser, tasks, tmp_path):
    """Killed after a new lowest that no checkpoint knows of: the resumed run finds that of its checkpoint, or later."""
    train, valid = overfit(tmp_path)
    more = ["--valid", valid, "--valid-every", 1, "--max-steps", 14, "--save-every", 5]
    succeed(*flags(tmp_path / "whole", guesser, tasks, train, *more))
    cut = tmp_path / "cut"
    child = start(*flags(cut, guesser, tasks, train, *more))
    rows = cut / "metrics.jsonl"
    child.until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 7)
    child.kill(signal.SIGKILL)
    assert child.wait().returncode == -signal.SIGKILL
    state = torch.load(cut / "checkpoint" / "resume.pt", weights_only=True)
    assert (cut / f"best-{state['best']['step']:06d}" / "model.safetensors").exists()   # what the checkpoint names
    succeed("train_sft.py", "--resume", cut, "--labbook", tmp_path / "labbook.md")
    assert metrics(cut) == metrics(tmp_path / "whole")
    assert os.readlink(cut / "best") == os.readlink(tmp_path / "whole" / "best")
    for name in ("best", "checkpoint"):
        a, b = ((f / name / "model.safetensors").read_bytes() for f in (cut, tmp_path / "whole"))
        assert a == b
    assert len(list(cut.glob("best-*"))) == 1
    low = [json.loads((f / "final.json").read_text())["losses"] for f in (cut, tmp_path / "whole")]
    assert low[0] == low[1]


def test_a_resume_to_an_earlier_end_has_the_best_of_its_checkpoint(guesser, tasks, tmp_path):
    """The lowest of a step that the resumed run never reaches is gone with that step."""
    train, valid = overfit(tmp_path)
    folder = tmp_path / "run"
    child = start(*flags(folder, guesser, tasks, train, "--valid", valid, "--valid-every", 1, "--max-steps", 400,
                         "--save-every", 2, "--schedule", "constant"))
    rows = folder / "metrics.jsonl"
    child.until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3)
    child.kill(signal.SIGKILL)
    child.wait()
    step = torch.load(folder / "checkpoint" / "resume.pt", weights_only=True)["step"]
    succeed("train_sft.py", "--resume", folder, "--labbook", tmp_path / "labbook.md", "--max-steps", step)
    losses = {r["step"]: r["valid_loss"] for r in read_rows(rows)}
    assert max(losses) == step and os.readlink(folder / "best") == f"best-{min(losses, key=losses.get):06d}"
