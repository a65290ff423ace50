"""
What happens to a run folder over hours: it is extended, resumed in another place, started twice, its terminal goes, its
disk fills. Real processes and signals; nothing is counted twice, nothing is lost, and what changed is named.
"""
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import fake_runs
import pytest
import torch
from helpers import ROOT, problem, script_env, tiny_model, tiny_tokenizer, write_rows
from launch import jsonl, metrics, refused, run, start

import common
import report
from engine import Engine
from model import add_lora
from train_sft import answer_end

torch.set_num_threads(1)


def flags(folder, model, tasks, *more, labbook=None):
    return ["train_grpo.py", "--model", model, "--tasks-dir", tasks, "--lr", "1e-3", "--max-new", 24, "--eval-n", 2,
            "--limit", 2, "--warmup", 0, "--prompts-per-step", 2, "--num-generations", 4, "--save-every", 1,
            "--labbook", labbook or folder.parent / "labbook.md", "--output-dir", folder, *more]


def succeed(*command, **how):
    got = run(*command, **how)
    assert got.returncode == 0, got.stderr[-2000:]
    return got


def resume(folder, *more, labbook=None):
    return ["train_grpo.py", "--resume", folder, "--labbook", labbook or folder.parent / "labbook.md", *more]


def ends(labbook, name="run"):
    found, problems = common.read_labbook(labbook)
    assert not problems
    return [(r["kind"], r.get("status")) for r in found if r["run_id"] == name]


@pytest.fixture(scope="module")
def whole(guesser, tasks, tmp_path_factory):
    """An uninterrupted run of 4 steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    succeed(*flags(folder, guesser, tasks, "--max-steps", 4, "--eval-every", 2))
    return folder


def copy_of(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    shutil.copy(whole.parent / "labbook.md", tmp_path / "labbook.md")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace(str(whole.parent / "labbook.md"), str(tmp_path / "labbook.md")))
    return tmp_path / "run"


# ----------------------------------------------------------------------------------------------------------------------
# Nothing twice, nothing missing

def test_two_processes_do_not_work_in_one_folder(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    child = start(*resume(folder, "--max-steps", 400))
    child.until(lambda: len(jsonl(folder / "metrics.jsonl")) > 5)
    refused(run(*resume(folder, "--max-steps", 400)), "--resume", str(folder), "another process is at work")
    child.kill(signal.SIGTERM)
    assert child.wait().returncode == 143
    steps = [r["step"] for r in metrics(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert ends(tmp_path / "labbook.md") == [("start", None), ("run", "ok"), ("start", None), ("run", "stopped")]


def test_a_run_that_goes_on_is_not_at_an_end_before_it_ends(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    child = start(*resume(folder, "--max-steps", 400))
    child.until(lambda: len(jsonl(folder / "metrics.jsonl")) > 5)
    child.kill(signal.SIGKILL)
    child.wait()
    assert not (folder / "final.json").exists()
    assert json.loads((folder / "final-before.json").read_text())["config"]["max_steps"] == 4
    said = []
    report.load_run(folder, said)
    assert any("half-written" in x for x in said)


def test_an_evaluation_before_a_kill_is_not_counted_twice_and_the_losses_stay(whole, tmp_path):
    """Killed between the last evaluation and the record: only final.json and the record are missing."""
    folder = copy_of(whole, tmp_path)
    before = {name: (folder / name).read_bytes() for name in common.STEP_FILES}
    final = json.loads((folder / "final.json").read_text())
    (folder / "final.json").unlink()
    succeed(*resume(folder))
    assert {name: (folder / name).read_bytes() for name in common.STEP_FILES} == before
    again = json.loads((folder / "final.json").read_text())
    assert again["losses"] == final["losses"] and again["losses"]["last"] is not None
    assert again["scores"] == final["scores"]


def test_the_losses_of_sft_stay_when_a_kill_came_before_the_record(guesser, tasks, tmp_path):
    rows = [{"prompt": problem(i, f"{i + 50}?", 1)["prompt"],
             "completion": [{"role": "assistant", "content": "#### 1"}]} for i in range(6)]
    write_rows(tmp_path / "train.jsonl", rows[:4])
    write_rows(tmp_path / "valid.jsonl", rows[4:])
    folder = tmp_path / "run"
    succeed("train_sft.py", "--model", guesser, "--tasks-dir", tasks, "--data", tmp_path / "train.jsonl", "--valid",
            tmp_path / "valid.jsonl", "--valid-every", 1, "--lr", "1e-3", "--eval-n", 0, "--max-steps", 2,
            "--rows-per-step", 2, "--output-dir", folder, "--labbook", tmp_path / "labbook.md")
    losses = json.loads((folder / "final.json").read_text())["losses"]
    (folder / "final.json").unlink()
    succeed("train_sft.py", "--resume", folder, "--labbook", tmp_path / "labbook.md")
    assert json.loads((folder / "final.json").read_text())["losses"] == losses
    assert losses["train"] > 0 and losses["valid"] > 0


def test_an_evaluation_that_was_torn_between_two_splits_comes_again(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    (folder / "final.json").unlink()
    want = jsonl(folder / "eval.jsonl")
    rows = (folder / "eval.jsonl").read_text().split("\n")[:-1]
    assert [json.loads(r)["step"] for r in rows] == [0, 0, 2, 2, 4, 4]
    shutil.rmtree(folder / "checkpoint-000004")
    succeed(*flags(tmp_path / "short", json.loads((folder / "config.json").read_text())["args"]["model"],
                   json.loads((folder / "config.json").read_text())["args"]["tasks_dir"], "--max-steps", 2))
    shutil.copytree(tmp_path / "short" / "checkpoint-000002", folder / "checkpoint-000002")
    (folder / "checkpoint").unlink()
    (folder / "checkpoint").symlink_to("checkpoint-000002")
    (folder / "eval.jsonl").write_text("\n".join(rows[:3]) + "\n" + rows[3][:100])   # step 2: one split and a half
    succeed(*resume(folder))
    assert [{**r, "wall_s": 0} for r in jsonl(folder / "eval.jsonl")] == [{**r, "wall_s": 0} for r in want]
    assert (folder / "eval_samples.jsonl").read_bytes() == (whole / "eval_samples.jsonl").read_bytes()


def test_a_run_resumed_from_inside_its_folder_keeps_its_name(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    succeed("train_grpo.py", "--resume", ".", "--max-steps", 5, cwd=folder)
    assert ends(tmp_path / "labbook.md") == [("start", None), ("run", "ok")] * 2


@pytest.mark.parametrize("flag, below", [("--model", "checkpoint"), ("--model", ""), ("--adapter", ""),
                                         ("--adapter", "checkpoint")])
def test_a_record_names_the_run_that_its_model_comes_from(flag, below, whole, guesser, tasks, tmp_path):
    folder, model = whole, []
    if flag == "--adapter":
        folder, model = tmp_path / "lora", ["--model", guesser]
        succeed(*flags(folder, guesser, tasks, "--eval-n", 0, "--max-steps", 1, "--lora-rank", 2))
    elif not below:   # a model of no run
        folder = guesser
    succeed("eval_passk.py", *model, flag, folder / below, "--tasks-dir", tasks, "--n", 1, "--limit", 2, "--max-new", 4,
            "--labbook", tmp_path / "eval.md")
    record, = common.read_labbook(tmp_path / "eval.md")[0]
    assert record["parent"] == (None if folder == guesser else folder.name)
    assert record["budget"].keys() >= {"peak_mem_gib", "cost"}


def test_report_keeps_a_run_that_was_extended_apart_from_shorter_seeds(tmp_path):
    evals = [(0, fake_runs.evaluation([0.3] * 20)), (20, fake_runs.evaluation([0.5] * 20, seed=1))]
    for seed in range(2):
        fake_runs.fake_run(tmp_path / f"s{seed}", evals, seed=seed)
    for seed in range(2):
        record = {"script": "train_grpo", "status": "ok", "config": {"max_steps": 20 + 100 * seed}, "time": "x"}
        (tmp_path / f"s{seed}" / "final.json").write_text(json.dumps(record))
    said = []
    study, = report.make_studies(*report.load_all([tmp_path], said), said)
    assert [len(c.runs) for c in study.conditions] == [1, 1]


def test_the_later_of_two_runs_of_a_seed_is_the_later_in_time():
    """Tokyo's clock stands 17 hours before that of Los Angeles."""
    tokyo, angeles = {"time": "2026-01-02T03:00:00+0900"}, {"time": "2026-01-01T12:00:00-0800"}
    assert tokyo["time"] > angeles["time"] and report.moment(tokyo) < report.moment(angeles)
    assert report.moment({}) == report.moment({"time": "?"}) == 0


# ----------------------------------------------------------------------------------------------------------------------
# What decides on the prompts and the shapes must be what it was

@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "template"])
def test_a_resume_refuses_another_config_tokenizer_or_template(name, guesser, tasks, tmp_path):
    shutil.copytree(guesser, tmp_path / "model")
    template = tmp_path / "t.jinja"
    template.write_text(tiny_tokenizer().chat_template)
    folder = tmp_path / "run"
    succeed(*flags(folder, tmp_path / "model", tasks, "--eval-n", 0, "--max-steps", 1, "--template", template))
    changed = template if name == "template" else tmp_path / "model" / name
    changed.write_text((changed.read_text() if changed.exists() else "{}") + "\n")   # a space changes the text
    refused(run(*resume(folder, "--max-steps", 2)), "config, tokenizer or chat template has changed")
    assert ends(tmp_path / "labbook.md") == [("start", None), ("run", "ok")]


def test_a_resume_on_another_commit_says_so(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    now, config["git"]["commit"] = config["git"]["commit"], "0123456789ab"
    (folder / "config.json").write_text(json.dumps(config))
    succeed(*resume(folder, "--max-steps", 5))
    notes = json.loads((folder / "final.json").read_text())["notes"]
    assert notes == f"begun at commit 0123456789ab, resumed at {now}"


def test_a_resume_of_another_versions_flags_is_refused(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["args"]["gamma"] = 1.0
    (folder / "config.json").write_text(json.dumps(config))
    refused(run(*resume(folder, "--max-steps", 5)), "gamma is no flag of this script")


def test_a_preset_that_sets_what_is_no_flag_is_an_error(capsys):
    p = common.Parser(prog="x.py")
    p.add_argument("--preset", choices=["a"])
    with pytest.raises(SystemExit):
        common.parse_args(p, ["--preset", "a"], {"a": {"evalevery": 3}})
    assert "--preset a: it sets evalevery" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Signals, and places that go away

def test_many_signals_still_leave_the_record(guesser, tasks, tmp_path):
    child = start(*flags(tmp_path / "run", guesser, tasks, "--max-steps", 4000))
    child.until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    while child.poll() is None:
        child.kill(signal.SIGINT)
        time.sleep(0.005)
    got = child.wait()
    assert got.returncode == 130 and len(got.stderr.splitlines()) <= 1, got.stderr
    assert [kind for kind, _ in ends(tmp_path / "labbook.md")] == ["start", "run"]
    assert (tmp_path / "run" / "final.json").exists()


def test_a_terminal_that_goes_stops_a_run_as_ctrl_c_does(guesser, tasks, tmp_path):
    child = start(*flags(tmp_path / "run", guesser, tasks, "--max-steps", 4000))
    child.until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    child.kill(signal.SIGHUP)
    child.kill(signal.SIGHUP)   # a shell and the kernel send one each
    assert child.wait().returncode == 129 and "SIGHUP" in child.out.read_text()   # a file takes it still
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["notes"]) == ("stopped", "SIGHUP")
    saved = torch.load(tmp_path / "run" / "checkpoint" / "resume.pt", weights_only=True)["step"]
    assert saved == metrics(tmp_path / "run")[-1]["step"]


def test_a_signal_at_the_very_end_changes_nothing(guesser, tasks, tmp_path):
    late = tmp_path / "late.py"
    late.write_text(f"""import os, runpy, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import common
write_curves = common.write_curves
def signals_and_curves(*args):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    write_curves(*args)
common.write_curves = signals_and_curves
runpy.run_path({str(ROOT / "train_grpo.py")!r}, run_name="__main__")
""")
    succeed(late, *flags(tmp_path / "run", guesser, tasks, "--eval-n", 0, "--max-steps", 1)[1:])
    assert ends(tmp_path / "labbook.md") == [("start", None), ("run", "ok")]


def test_nohup_is_heeded(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.excepthook
    try:
        common.Run(SimpleNamespace(resume=None, output_dir=tmp_path / "run", labbook=tmp_path / "lb.md", predict=[],
                                   curves=None, wandb=False, seed=0), "grpo")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        sys.excepthook = hook
        for number, handler in {**others, signal.SIGHUP: before}.items():
            signal.signal(number, handler)


def test_a_run_folder_that_is_moved_away_ends_in_the_labbook(guesser, tasks, tmp_path):
    (tmp_path / "book").mkdir()
    book = tmp_path / "book" / "labbook.md"
    child = start(*flags(tmp_path / "run", guesser, tasks, "--max-steps", 4000, labbook=book))
    child.until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    got = child.wait()
    assert got.returncode == 1 and len(got.stderr.splitlines()) == 1, got.stderr
    assert "could not be recorded" not in got.stderr and ends(book) == [("start", None), ("run", "failed")]
    assert len(metrics(tmp_path / "elsewhere")) < 4000


def test_a_record_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path, monkeypatch):
    book = tmp_path / "labbook.md"
    common.append_record(book, {"kind": "run", "run_id": "a"}, "- a")
    before = book.read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(common.os, "fsync", full)
    with pytest.raises(common.UserError, match="cannot be written"):
        common.append_record(book, {"kind": "run", "run_id": "b"}, "- b")
    assert book.read_bytes() == before


def test_a_run_folder_that_cannot_be_locked_is_one_line(tmp_path):
    (tmp_path / "config.json").mkdir()   # root may write any file, so a folder stands for one that is read-only
    with pytest.raises(common.UserError, match="cannot be locked .Is a directory"):
        common.Run.hold(SimpleNamespace(folder=tmp_path))


def test_an_output_folder_that_cannot_be_is_one_line(guesser, tasks, tmp_path):
    refused(run(*flags(tmp_path / ("x" * 300), guesser, tasks)), "--output-dir", "name too long")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    refused(run(*flags(tmp_path / "gone" / "run", guesser, tasks, labbook=tmp_path / "lb.md")), "cannot be made")


def test_a_report_whose_reader_has_seen_enough_ends_quietly(whole):
    gone, pipe = os.pipe()
    os.close(gone)
    done = subprocess.run([sys.executable, ROOT / "report.py", "--check", "--labbook", whole.parent / "labbook.md"],
                          stdout=pipe, stderr=subprocess.PIPE, env=script_env())
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("where", ["template", "train", "labbook"])
def test_a_pipe_is_refused_and_does_not_hang(where, guesser, tasks, tmp_path):
    pipe = tmp_path / "train.jsonl"
    os.mkfifo(pipe)
    if where == "template":
        got = run(*flags(tmp_path / "run", guesser, tasks, "--template", pipe), timeout=30)
    elif where == "train":
        got = run("eval_passk.py", "--model", guesser, "--tasks", pipe, "--n", 1, timeout=30)
    else:
        got = run("report.py", "--check", "--labbook", pipe, timeout=30)
    refused(got, str(pipe), "no plain file")


# ----------------------------------------------------------------------------------------------------------------------
# Prompts that do not change from day to day, and the token that ends an answer

CLOCK = ("{% if not date_string is defined %}{% set date_string = strftime_now('%H:%M:%S') %}{% endif %}"
         "{{ date_string }}")


def test_a_template_that_takes_the_date_gets_always_the_same_one():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CLOCK + tokenizer.chat_template
    text = tokenizer.decode(common.encode_prompt(tokenizer, problem(0, "1?", 1)["prompt"]))
    assert text.startswith("26 Jul 2024")


def test_a_template_that_reads_the_clock_and_several_templates(guesser, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ strftime_now('%H:%M:%S') }}" + tiny_tokenizer().chat_template)
    with pytest.raises(common.UserError, match="t.jinja: the chat template reads the clock"):
        common.load_tokenizer(guesser, template)
    shutil.copytree(guesser, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for names, good in ((("default", "tool_use"), True), (("rag", "tool_use"), False)):
        config["chat_template"] = [{"name": n, "template": tiny_tokenizer().chat_template} for n in names]
        path.write_text(json.dumps(config))
        if good:
            assert common.load_tokenizer(tmp_path / "model").chat_template == tiny_tokenizer().chat_template
        else:
            with pytest.raises(common.UserError, match="no chat template"):
                common.load_tokenizer(tmp_path / "model")


def test_an_answer_ends_with_the_token_that_the_template_writes():
    tokenizer = tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    other = tokenizer.convert_tokens_to_ids("<|pad|>")
    assert answer_end(tokenizer, (other, end)) == end
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert answer_end(tokenizer, (other, end)) == other
    tokenizer.chat_template = "{{ raise_exception('questions alone') }}"
    assert answer_end(tokenizer, (other, end)) == other


def test_sft_teaches_that_token(guesser, tasks, tmp_path):
    shutil.copytree(guesser, tmp_path / "model")
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<|pad|>", "<|end|>")]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    write_rows(tmp_path / "sft.jsonl", [{"prompt": problem(i, f"{i + 50}?", 1)["prompt"],
                                         "completion": [{"role": "assistant", "content": "#### 1"}]} for i in range(4)])
    got = succeed("train_sft.py", "--model", tmp_path / "model", "--tasks-dir", tasks, "--data", tmp_path / "sft.jsonl",
                  "--lr", "1e-3", "--eval-n", 0, "--max-steps", 1, "--rows-per-step", 2, "--output-dir",
                  tmp_path / "run", "--labbook", tmp_path / "labbook.md")
    assert re.search(r"\[\[#### 1<\|end\|>\]\]", got.stdout), got.stdout


# ----------------------------------------------------------------------------------------------------------------------
# X35: the sampler's copies of the weights are those of the trainer, to the bit

@pytest.mark.parametrize("how", ["bf16", "adapter", "moved"])
def test_copies_that_were_not_refreshed_stop_the_rollout(how, monkeypatch):
    model = tiny_model(scale=2.0)
    if how == "bf16":
        model.compute_dtype = torch.bfloat16
    if how == "adapter":
        add_lora(model, 2)
    engine = Engine(model)
    for seed in range(3):
        engine.generate([[5, 6, 7]], 2, max_new=4, seed=seed)
    monkeypatch.setattr(Engine, "refresh", lambda self: None)
    engine.generate([[5, 6, 7]], 2, max_new=4)   # nothing moved: nothing is stale
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                if how == "moved":
                    p.data = p.data.clone()
                p.add_(0.01)   # also of the adapter's B, which is 0
    with pytest.raises(common.RunError, match="sampler's weights are not those of the model"):
        for _ in range(40):   # another copy at each call
            engine.generate([[5, 6, 7]], 2, max_new=4)


def test_each_copy_has_its_turn(monkeypatch):
    """One weight alone moves, each of the adapted ones once; the shared head of an fp32 model is no copy."""
    model = tiny_model(scale=2.0)
    add_lora(model, 2)
    engine = Engine(model)
    monkeypatch.setattr(Engine, "refresh", lambda self: None)
    assert len(engine.copied) == 4 * len(model.model.layers)
    for _, modules, _ in engine.copied:
        weight = modules[0].lora_B
        with torch.no_grad():
            weight.add_(0.01)
        with pytest.raises(common.RunError, match="sampler's weights"):
            for _ in engine.copied:
                engine.check_weights()
        with torch.no_grad():
            weight.zero_()
    for _ in engine.copied:
        engine.check_weights()


def test_a_diverged_model_is_not_called_stale():
    model = tiny_model()
    model.compute_dtype = torch.bfloat16
    engine = Engine(model)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    engine.refresh()
    engine.check_weights()
