"""
--task math500: answers that are LaTeX are compared as values, a key that cannot be read is refused, and no answer keeps
the grader longer than its time limit.
"""
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import DATA, ROOT, read_rows, run_script, script_env, write_rows

import common
from common import UserError

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs package math-verify")

from envs import TASKS, MathTask, get_task, last_box  # noqa: E402  (the skip above comes first)

TASK = MathTask()
MATH = DATA / "math500" / "test.jsonl"
needs_data = pytest.mark.skipif(not MATH.exists(), reason="needs ../shared/data")


def row(answer, number=0):
    return {"id": f"m{number}", "prompt": [{"role": "user", "content": f"What is {number}?"}], "answer": answer,
            "task": "math500"}


def grade(gold, text):
    return TASK.grade(text, row(gold))


# ----------------------------------------------------------------------------------------------------------------------
# The table: what stands behind the mark, beside the key

EQUAL = [
    # numbers, in every spelling
    ("5", "5"), ("5", "5."), ("5", " 5 "), ("5", "**5**"), ("5", "$5$"), ("5", "\\(5\\)"), ("5", "\\boxed{5}"),
    ("5", "$\\boxed{5}$."), ("5", "5.0"), ("5", "x = 5"), ("x=5", "5"), ("-3", "-3"), ("5", "2+3"), ("120", "5!"),
    ("10,\\!080", "10080"), ("10080", "10,080"), ("1000000", "10^6"), ("0.0000672", "6.72 \\times 10^{-5}"),
    # fractions and decimals
    ("\\frac{3}{4}", "3/4"), ("\\frac34", "0.75"), ("\\frac{3}{4}", "\\dfrac{6}{8}"), ("1\\frac{4}{5}", "9/5"),
    ("\\frac{1}{3}", "0.333333"), ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    # roots, pi, expressions
    ("3\\sqrt{2}", "\\sqrt{18}"), ("\\frac{\\sqrt3}{3}", "\\frac{1}{\\sqrt{3}}"), ("2\\pi", "\\pi \\cdot 2"),
    ("x^2+2x+1", "(x+1)^2"), ("p - q", "-q + p"), ("6 - 5i", "-5i + 6"), ("\\cot x", "\\frac{1}{\\tan x}"),
    ("y = 2x + 3", "y - 2x = 3"), ("2", "\\log_{10} 100"),
    # sets, intervals, points, matrices
    ("1,-2", "-2, 1"), ("1,-2", "\\{1,-2\\}"), ("1,-2", "1 \\text{ and } -2"),
    ("1 \\pm \\sqrt{2}", "1-\\sqrt2, 1+\\sqrt2"),
    ("(3,4]", "\\left(3, 4\\right]"), ("(3,4]", "(3, \\frac{8}{2}]"), ("x \\in [-2,7]", "[-2,7]"),
    ("[-2,7]", "x \\in [-2,7]"), ("[-2,7]", "-2 \\le x \\le 7"),
    ("(-\\infty,2)\\cup(3,\\infty)", "(3,\\infty) \\cup (-\\infty,2)"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"), ("(8,-2)", "(8, -2)"),
    ("\\begin{pmatrix} 1/5 \\\\ -2 \\end{pmatrix}", "\\begin{bmatrix} 0.2 \\\\ -2 \\end{bmatrix}"),
    # units, degrees, percent, money, bases
    ("15\\mbox{ cm}^2", "15"), ("15\\mbox{ cm}^2", "15 cm^2"), ("15", "15 \\text{ square inches}"),
    ("7", "7 square feet"),
    ("90^\\circ", "90"), ("90", "90^{\\circ}"), ("90^\\circ", "90°"), ("90^\\circ", "90 degrees"),
    ("50\\%", "50"), ("50\\%", "0.5"), ("50\\%", "50%"), ("\\$36", "36"), ("36", "\\$36.00"), ("36", "$36"),
    ("36", "36 dollars"), ("5.4 \\text{ cents}", "5.4"), ("52_8", "52_{8}"), ("52_8", "52"),
    # words
    ("\\text{east}", "east"), ("\\text{east}", "East."), ("\\text{(C)}", "C"), ("\\text{(C)}", "(C)"),
    ("\\text{Evelyn}", "\\text{Evelyn}"), ("even", "\\text{even}"),
]
UNEQUAL = [
    ("5", "6"), ("5", "-5"), ("-3", "3"), ("5", "50"), ("5", ""), ("5", "five"), ("5", "x"), ("5", "\\infty"),
    ("5", "5t"), ("5", "5x"), ("1000000", "1000001"), (".0000672", ".0000673"), ("0.0000672", "6.73 \\times 10^{-5}"),
    ("0", "0.0001"), ("3", "\\frac{3}{0}"), ("0", "\\frac{0}{0}"),
    ("\\frac{3}{4}", "4/3"), ("\\frac{3}{4}", "3"), ("\\frac{1}{3}", "0.33"), ("1\\frac{4}{5}", "4/5"),
    ("\\frac12", "12"), ("3\\sqrt{2}", "3\\sqrt{3}"), ("\\sqrt{2}", "1.41"), ("2\\pi", "2"), ("x^2+2x+1", "x^2+1"),
    ("p - q", "q - p"), ("6 - 5i", "6 + 5i"), ("y = 2x + 3", "y = 2x + 4"), ("x=5", "x=6"),
    # an answer that names several values is none of them
    ("5", "5 or 6"), ("5", "5, 6"), ("5", "6, 5"), ("5", "\\{5, 6\\}"), ("5", "\\pm 5"), ("5", "5 \\text{ or } 6"),
    ("5", "5;6"), ("5", "1,2,3,4,5,6,7,8,9"), ("5", "[0, 10]"), ("5", "x \\le 5"), ("1,-2", "1"),
    ("1 \\pm \\sqrt{2}", "1+\\sqrt{2}"), ("(3,4]", "(3,4)"), ("(3,4]", "[3,4]"), ("(8,-2)", "(-2,8)"),
    ("[-2,7]", "-2 \\le x \\le 8"), ("(-\\infty,2)\\cup(3,\\infty)", "(-\\infty,2)"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}"),
    ("15\\mbox{ cm}^2", "16 cm^2"), ("90^\\circ", "91"), ("50\\%", "5"), ("0.5", "5%"), ("52_8", "52_9"),
    ("52_8", "42"), ("\\text{east}", "west"), ("\\text{east}", "seat"), ("\\text{(C)}", "B"),
    ("\\text{(C)}", "(A)(B)(C)"), ("even", "odd"), ("\\text{ellipse}", "hyperbola or ellipse"),
    # fragments that are no LaTeX, and words that are none of ours
    ("5", "\\frac{5"), ("5", "\\boxed{"), ("5", "(5"*9), ("5", "\\undefined{5}"), ("5", "nan"), ("5", "#"),
    ("5", "__import__('os')"), ("5", "\u2028"), ("5", "\ud800"), ("5", "\x00"),
]


def test_the_table_is_large_enough():
    assert len(EQUAL) >= 60 and len(UNEQUAL) >= 60 and len(set(EQUAL + UNEQUAL)) == len(EQUAL) + len(UNEQUAL)


@pytest.mark.parametrize("gold, answer", EQUAL)
def test_equal_values(gold, answer):
    assert grade(gold, f"So it is.\n#### {answer}\nDone.")["right"]


@pytest.mark.parametrize("gold, answer", UNEQUAL)
def test_unequal_values(gold, answer):
    assert not grade(gold, f"So it is.\n#### {answer}\nDone.")["right"]


READINGS = [   # text, strict answer, strict, lenient; the key is \frac{3}{4}
    ("#### 3/4", "3/4", True, True),
    ("####0.75", "0.75", True, True),
    ("#### 1\n#### 3/4", "3/4", True, True),                        # the last mark counts
    ("#### 3/4\n#### 1", "1", False, False),
    ("#### 3/4\n" + "and so on " * 200, "3/4", True, True),         # text behind it does not
    ("\\boxed{3/4}\n#### 1", "1", False, False),                     # the mark comes before the box
    ("####", None, False, False),
    ("####\n3/4", None, False, True),                                # on its line
    ("#### \n\\boxed{3/4}", None, False, True),                       # an empty mark is no mark
    ("#### **", None, False, False),
    ("so \\boxed{\\frac{3}{4}}.", None, False, True),
    ("\\boxed{1} no, \\boxed{\\frac{3}{4}}", None, False, True),
    ("\\boxed{\\frac{3}{4}} no, \\boxed{1}", None, False, False),
    ("the answer is $\\frac{3}{4}$.", None, False, True),
    ("the final answer is 3/4", None, False, True),
    ("the answer is $\\frac{3}{4}$, no: the answer is $\\frac{1}{4}$", None, False, False),
    ("no idea", None, False, False),
    ("", None, False, False),
    ("#### " + "3/4 + 0" + " + 0" * 200, None, False, True),         # longer than any key: no answer in the format
]


@pytest.mark.parametrize("text, answer, strict, lenient", READINGS)
def test_strict_and_lenient_readings(text, answer, strict, lenient):
    assert grade("\\frac{3}{4}", text) == {"right": strict, "lenient": lenient, "answer": answer}


def test_a_key_may_be_a_whole_number():
    assert grade(5, "#### 5")["right"] and not grade(5, "#### 6")["right"]


@pytest.mark.parametrize("text, found", [
    ("\\boxed{1}", "1"), ("a \\boxed{\\frac{1}{2}} b}", "\\frac{1}{2}"), ("\\boxed{1} \\boxed{2}", "2"),
    ("\\boxed{1", None), ("none", None), ("\\boxed{}", "")])
def test_the_last_box(text, found):
    assert last_box(text) == found


# ----------------------------------------------------------------------------------------------------------------------
# Time: an answer that never ends is wrong, is counted, and leaves the grader whole

HOSTILE = ["9^{9^{9^9}}", "(a+b+c+d+e)^{60}"]


@pytest.mark.parametrize("answer", HOSTILE[:1] + [pytest.param(a, marks=pytest.mark.slow) for a in HOSTILE[1:]])
def test_an_answer_without_end_is_stopped_and_counted(answer, capfd):
    TASK.verifier.equal.cache_clear()
    grade("\\sqrt{5}", "#### 5^{1/2}")   # the process is up
    before, start = TASK.verifier.stopped, time.monotonic()
    assert not grade("\\sqrt{5}", f"#### {answer}")["right"]
    assert time.monotonic() - start < 22 and TASK.verifier.stopped == before + 1   # 2 s of CPU on a busy machine
    assert "counts as wrong" in capfd.readouterr().err
    assert not grade("\\sqrt{5}", f"#### {answer}")["right"] and TASK.verifier.stopped == before + 1   # remembered
    assert grade("\\sqrt{5}", "#### \\frac{5}{\\sqrt5}")["right"]   # a new process


@pytest.mark.slow
def test_four_hundred_braces_are_wrong_whether_they_are_read_in_time_or_not():
    """They take about the 2 s of CPU that an answer has: some machines end it, some read it."""
    before = TASK.verifier.stopped
    assert not grade("\\sqrt{5}", f"#### {'{' * 400}")["right"] and TASK.verifier.stopped - before in (0, 1)
    assert grade("\\sqrt{5}", "#### \\frac{5}{\\sqrt5}")["right"]


def test_a_dead_process_costs_no_answer():
    assert grade("\\sqrt{7}", "#### 7^{1/2}")["right"]
    TASK.verifier.child.kill()   # by the system, say
    TASK.verifier.child.wait()
    before = TASK.verifier.stopped
    assert grade("\\sqrt{11}", "#### 11^{1/2}")["right"] and TASK.verifier.stopped == before


def test_an_interrupt_leaves_no_reply_to_the_next_question(monkeypatch):
    grade("\\sqrt{7}", "#### 7^{1/2}")
    child = TASK.verifier.child

    def interrupted():
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(child.stdout, "readline", interrupted, raising=False)
        grade("\\sqrt{13}", "#### 13^{1/2}")
    assert not grade("\\sqrt{17}", "#### 18^{1/2}")["right"] and grade("\\sqrt{17}", "#### 17^{1/2}")["right"]


def test_it_starts_late_and_knows_no_torch():
    task = type("Fresh", (MathTask,), {"verifier": type(TASK.verifier)()})()
    assert task.equal("5", "5") and task.equal("\\text{east}", "east") and task.verifier.child is None
    assert "torch" not in task.verifier.program


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["7^{1/2}", "9^{9^{9^9}}"])
def test_it_dies_with_the_parent(answer):
    """Killed while it waits for a question, and in the middle of one."""
    code = ("from envs import MathTask as T; t = T(); t.equal('\\\\sqrt{5}', '5^{1/2}')\n"
            "print(t.verifier.child.pid, flush=True)\n"
            f"t.equal('\\\\sqrt{{7}}', {answer!r}); input()")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=script_env(), text=True, stdout=subprocess.PIPE,
                          stdin=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        time.sleep(0.3)
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):   # seconds of CPU, and the machine may be busy
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        stat = Path(f"/proc/{child}/stat")   # Linux; a container without an init keeps the dead
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the grading process outlived its parent")


# ----------------------------------------------------------------------------------------------------------------------
# Files

@pytest.mark.parametrize("gold", ["", "\\frac{", "((", "{", "\\text{}", "$", " \\$ "])
def test_a_key_that_cannot_be_read_is_refused_with_file_and_line(tmp_path, gold):
    write_rows(tmp_path / "test.jsonl", [row("\\frac12", 0), row("\\sqrt2", 1), row(gold, 2)])
    with pytest.raises(UserError, match=r"test\.jsonl:3: `answer` .* is no value"):
        MathTask(tmp_path).load("test")


def test_the_task_is_listed_and_has_no_train_split(tmp_path):
    write_rows(tmp_path / "test.jsonl", [row("1")])
    task = get_task("math500", tmp_path)
    assert TASKS["math500"] is MathTask and task.splits == ("test",) and task.extractor == "math-verify-1"
    with pytest.raises(UserError, match="no train.jsonl, it is a test"):
        task.load(task.train)
    write_rows(tmp_path / "train.jsonl", [row("2")])
    assert task.load(task.train)[0]["answer"] == "2"
    with pytest.raises(UserError, match="no such file"):
        task.path("heldout-same")


def test_eval_passk_runs_as_it_is(tmp_path, guesser):
    """The guesser says `#### 1` or `#### 2`: keys that are 1 in another spelling must be found, a root never."""
    write_rows(tmp_path / "test.jsonl", [row("x=1", 0), row("\\frac{\\sqrt{4}}{2}", 1), row("\\sqrt{3}", 2)])
    done = run_script("eval_passk.py", "--model", guesser, "--task", "math500", "--tasks-dir", tmp_path, "--n", 8,
                      "--max-new", 24, "--device", "cpu", "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["task"], result["split"], result["extractor"]) == ("math500", "test", "math-verify-1")
    ones = [sum(a == "1" for a in p["answers"]) for p in result["problems"]]
    assert [p["c"] for p in result["problems"]] == [ones[0], ones[1], 0] and sum(ones) > 0


@pytest.mark.slow
def test_grpo_runs_as_it_is(tmp_path, guesser):
    rows = [row(("x=1", "\\frac{4}{2}")[i % 2], i) for i in range(8)]
    write_rows(tmp_path / "test.jsonl", [row("x=1", 8), row("2", 9)])
    flags = ["--model", guesser, "--task", "math500", "--tasks-dir", tmp_path, "--lr", "1e-3", "--max-steps", 2,
             "--prompts-per-step", 4, "--num-generations", 4, "--max-new", 24, "--eval-n", 2, "--device", "cpu",
             "--labbook", tmp_path / "book.md", "--output-dir", tmp_path / "run"]
    refused = run_script("train_grpo.py", *flags)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "no train.jsonl" in refused.stderr
    write_rows(tmp_path / "train.jsonl", rows)
    done = run_script("train_grpo.py", *flags)
    assert done.returncode == 0, done.stderr
    assert any(r["reward"] > 0 for r in read_rows(tmp_path / "run" / "metrics.jsonl"))


# ----------------------------------------------------------------------------------------------------------------------
# The whole real set

@needs_data
def test_every_real_key_scores_and_a_wrong_one_does_not():
    """Rendered as the prompt asks, a key scores 1; the key of the problem before, and a number off by one, 0."""
    golds = [r["answer"] for r in map(json.loads, MATH.read_text(encoding="utf-8").split("\n")[:-1])]
    assert len(golds) == 500
    unread = [g for g in golds if not TASK.equal(g, g)]
    missed = [g for g in golds if not grade(g, f"We add.\n#### {g}")["right"]]
    others = {(g, w) for g, w in zip(golds, golds[-1:] + golds[:-1]) if g != w and grade(g, f"#### {w}")["right"]}
    numbers = [(g, common.read_number(g, whole=True)) for g in golds]
    shifted = [g for g, x in numbers if x is not None and grade(g, f"#### {x + 1}")["right"]]
    assert (unread, missed, shifted) == ([], [], []) and len([x for _, x in numbers if x is not None]) > 300
    assert others <= {("x=5", "5"), ("5", "x=5")}


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("form", ["#### ${}$.", "#### **\\({}\\)**", "#### \\boxed{{{}}}", "so $\\boxed{{{}}}$"])
def test_every_real_key_in_the_forms_that_models_write(form):
    golds = sorted({r["answer"] for r in map(json.loads, MATH.read_text(encoding="utf-8").split("\n")[:-1])})
    assert [g for g in golds if not grade(g, form.format(g))["lenient"]] == []
