"""data/exercism, data/mbpp, data/humaneval: what prepare.py writes, from small sources of our own and the real ones."""

import gzip
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import unittest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def load(name):
    spec = importlib.util.spec_from_file_location(f"prepare_code_{name}", ROOT / "data" / name / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exercism, mbpp, humaneval = load("exercism"), load("mbpp"), load("humaneval")
Stop = exercism.Stop


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_tests(source, code, module):
    """(tests run, all passed) of a unittest module in this process: a reader that is not the sandbox."""
    fake, space = type(sys)(module), {"__name__": "tests"}
    exec(code, vars(fake))
    sys.modules[module] = fake
    try:
        exec(source, space)
        cases = [value for value in space.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
        suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases])
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    finally:
        del sys.modules[module]
    return result.testsRun, result.wasSuccessful()


# ---------------------------------------------------------------------------------------------------------------------
# sources of our own

TESTS = """import unittest

from {m} import (
    double,
)

LIMIT = 3


class DoubleTest(unittest.TestCase):
    # a comment that stays
    def setUp(self):
        self.n = LIMIT

    def test_one(self):
        self.assertEqual(double(1), 2)

    @unittest.skipIf(False, "never")
    def test_field(self):
        self.assertEqual(double(self.n), 6)

    def test_text(self):
        text = '''a
def test_not_one(self):
    b'''
        self.assertEqual(double(text), text + text)

    def test_zero(self):
        self.assertEqual(double(0), 0)


class MoreTest(unittest.TestCase):
    def test_only(self):
        self.assertEqual(double([]), [])
"""
ONE_TEST = "import unittest\n\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        pass\n"
REFERENCE = "def double(x):\n    return x + x\n"
STUB = "def double(x):\n    pass\n"


def exercise(slug, **changes):
    module = slug.replace("-", "_")
    return {"slug": slug, "name": slug, "status": "active", "difficulty": 2, "instructions": "Double it.",
            "stub_files": {f"{module}.py": STUB}, "test_files": {f"{module}_test.py": TESTS.format(m=module)},
            "reference_files": {f"{module}.py": REFERENCE}} | changes


def problem(number, **changes):
    return {"task_id": number, "text": "Write a function to add.", "test_setup_code": "", "challenge_test_list": [],
            "code": "import sys\r\ndef add(a, b):\r\n    return a + b",
            "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add('a', 'b') == 'ab'"]} | changes


PROMPT = '''def helper(x):
    return x


def add(a, b):
    """ Adds.
    >>> add(1, 2)
    3
    >>> add(0.1, 0.2)
    0.3
    >>> print("no")
    no
    """
'''


def function(number, **changes):
    return {"task_id": f"HumanEval/{number}", "prompt": PROMPT, "canonical_solution": "    return helper(a) + b\n",
            "entry_point": "add",
            "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(helper(1), 1) == 2\n"} | changes


# ---------------------------------------------------------------------------------------------------------------------
# exercism


def test_split_keeps_every_test_once_and_all_else():
    source = TESTS.format(m="a")
    names = exercism.test_names(source)
    assert names == ["DoubleTest.test_one", "DoubleTest.test_field", "DoubleTest.test_text", "DoubleTest.test_zero",
                     "MoreTest.test_only"]
    for seed in range(40):  # forty names, so forty splits
        visible, hidden = exercism.split_names(f"a{seed}", names)
        assert visible | hidden == set(names) and not visible & hidden and len(hidden) == 2  # 30% of 5 is 1.5
        ran = 0
        for keep in (visible, hidden):
            part = exercism.keep_tests(source, keep)
            assert set(exercism.test_names(part)) == keep
            assert "# a comment that stays" in part and "LIMIT = 3" in part and "def setUp" in part
            count, right = run_tests(part, REFERENCE, "a")
            assert right and count == len(keep)
            assert not run_tests(part, STUB, "a")[1]
            ran += count
        assert ran == len(names)


def test_split_is_the_same_everywhere():
    """Values worked out once: another hash or another share would change what models were trained on."""
    _, hidden = exercism.split_names("a", ["T.test_a", "T.test_b", "T.test_c", "T.test_d"])
    assert hidden == {"T.test_a"}
    _, heldout = exercism.hold_out([{"id": f"exercism-{n}"} for n in range(60)])
    assert [row["id"] for row in heldout][:3] == ["exercism-0", "exercism-1", "exercism-2"]


def test_exercism_writes_two_splits_and_the_gate(tmp_path, capsys):
    source = lines(tmp_path / "practice.jsonl", [
        exercise("ab-one"), exercise("ab-two"), exercise("old", status="deprecated"),
        exercise("solved", stub_files={"solved.py": REFERENCE}),
        exercise("broken", reference_files={"broken.py": STUB}),
        exercise("tiny", test_files={"tiny_test.py": ONE_TEST}),
    ])
    exercism.main(["--source", str(source), "--output-dir", str(tmp_path / "out")])
    rows = {name: read(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "heldout", "gate")}
    assert len(rows["train"]) == 1 and len(rows["heldout"]) == 1
    row = rows["train"][0]
    assert {"id", "prompt", "answer", "task", "module", "entry", "stub", "visible_tests", "hidden_tests",
            "expect_tests", "helpers", "plain"} <= set(row)
    assert row["expect_tests"] == {"visible": 3, "hidden": 2} and row["helpers"] == {} and row["reference_lines"] == 2
    assert "Double it." in row["prompt"][0]["content"] and "def double(x):" in row["prompt"][0]["content"]
    assert REFERENCE not in row["prompt"][0]["content"]
    reasons = {line["id"]: line["reason"] for line in rows["gate"]}
    assert reasons["exercism-ab-one"] == "" and reasons["exercism-old"] == "deprecated upstream"
    assert "stub passes" in reasons["exercism-solved"]
    assert "reference" in reasons["exercism-broken"] and "nothing to hide" in reasons["exercism-tiny"]
    printed = capsys.readouterr().out
    assert "sha256" in printed and "train.jsonl" in printed and printed.splitlines()[-1].startswith("wrote exercism to")


def track(folder):
    """A repository of the track with one exercise, as its own tree."""
    files = {
        "config.json": json.dumps({"exercises": {"practice": [{"slug": "ab-one", "difficulty": 3}], "concept": []}}),
        "exercises/practice/ab-one/.meta/config.json": json.dumps({"files": {
            "solution": ["ab_one.py"], "test": ["ab_one_test.py"], "example": [".meta/example.py"],
            "editor": ["help_me.py"]}}),
        "exercises/practice/ab-one/.meta/example.py": REFERENCE,
        "exercises/practice/ab-one/.docs/instructions.md": "Double it.\n",
        "exercises/practice/ab-one/.docs/instructions.append.md": "Twice.\n",
        "exercises/practice/ab-one/ab_one.py": STUB,
        "exercises/practice/ab-one/ab_one_test.py": TESTS.format(m="ab_one"),
        "exercises/practice/ab-one/help_me.py": "X = 1\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_exercism_reads_a_checkout_and_its_archive(tmp_path):
    checkout = track(tmp_path / "python-main")
    archive = tmp_path / "main.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(checkout, arcname="python-main")
    found = []
    for source in (checkout, archive):
        args = exercism.code_tasks.get_args("", tmp_path, ["--source", str(source)])
        (_, row), = exercism.read_rows(args)
        found.append(exercism.make_row(row, "here"))
    assert found[0] == found[1]
    assert found[0]["helpers"] == {"help_me.py": "X = 1\n"} and found[0]["difficulty"] == 3
    assert "Double it.\n\nTwice." in found[0]["prompt"][0]["content"]


# ---------------------------------------------------------------------------------------------------------------------
# MBPP


def test_mbpp_rows(tmp_path):
    row = mbpp.make_row(problem(11), "here")
    assert row["entry"] == "add" and row["expect_tests"] == {"visible": 1, "hidden": 2} and "\r" not in row["answer"]
    assert "assert add(1, 2) == 3" in row["prompt"][0]["content"] and "'ab'" not in row["prompt"][0]["content"]
    assert run_tests(row["visible_tests"], row["answer"], "solution") == (1, True)
    assert run_tests(row["hidden_tests"], row["answer"], "solution") == (2, True)
    assert run_tests(row["hidden_tests"], row["stub"], "solution") == (2, False)


def test_mbpp_oddities():
    """A solution named like a builtin, setup code that uses the solution's class, a module taken from the solution."""
    def made(**changes):
        row = mbpp.make_row(problem(1, **changes), "here")
        return row, run_tests(row["hidden_tests"], row["answer"], "solution")

    row, ran = made(code="def sum(a, b):\n    return a + b", test_list=["assert sum(1, 2) == 3"] * 2)
    assert row["entry"] == "sum" and ran == (1, True)
    row, ran = made(code="class Node:\n    def __init__(self, x):\n        self.x = x\ndef get(n):\n    return n.x",
                    test_setup_code="root = Node(1)\r\nroot.x = 5", test_list=["assert get(root) == 5"] * 3)
    assert row["entry"] == "get" and ran == (2, True)
    row, ran = made(code="import sys\ndef size(x):\n    return sys.getsizeof(x)",
                    test_list=["assert size(1) == sys.getsizeof(1)"] * 2)
    assert "import sys" in row["hidden_tests"] and ran == (1, True)


def test_mbpp_writes_the_published_splits(tmp_path):
    numbers = [1, 10, 11, 510, 511, 600, 601, 974]
    empty = problem(12, test_list=["assert add(1, 2) == 3", "assert add(1, None) is None"],
                    code="def add(a, b):\n    return b and a + b")  # an empty body passes its hidden test
    lines(tmp_path / "mbpp.jsonl", [problem(number) for number in numbers] + [empty])
    mbpp.main(["--source", str(tmp_path), "--output-dir", str(tmp_path / "out")])
    ids = {name: [row["task_id"] for row in read(tmp_path / "out" / f"{name}.jsonl")] for name in mbpp.SPLITS}
    assert ids == {"fewshot": [1, 10], "test": [11, 510], "validation": [511, 600], "train": [601, 974]}
    left_out = {line["id"]: line["reason"] for line in read(tmp_path / "out" / "gate.jsonl") if not line["kept"]}
    assert list(left_out) == ["mbpp-12"] and "stub passes" in left_out["mbpp-12"]


# ---------------------------------------------------------------------------------------------------------------------
# HumanEval


def test_humaneval_rows(tmp_path):
    source = tmp_path / "HumanEval.jsonl.gz"
    rows = [function(0), function(1, canonical_solution="    return 0\n")]
    source.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    humaneval.main(["--source", str(source), "--output-dir", str(tmp_path / "out")])
    row, = read(tmp_path / "out" / "test.jsonl")
    assert row["id"] == "humaneval-0" and "examples" not in row
    # 0.1 + 0.2 is not 0.3, so that example goes; print(...) never was one
    assert row["expect_tests"] == {"visible": 1, "hidden": 1} and "0.3" not in row["visible_tests"]
    assert run_tests(row["visible_tests"], row["answer"], "solution") == (1, True)
    assert run_tests(row["hidden_tests"], row["answer"], "solution") == (1, True)
    assert run_tests(row["hidden_tests"], row["stub"], "solution") == (1, False)
    left_out = [line["id"] for line in read(tmp_path / "out" / "gate.jsonl") if not line["kept"]]
    assert left_out == ["humaneval-1"]


# ---------------------------------------------------------------------------------------------------------------------
# bad input

GOOD = {"exercism": exercise("ab-one"), "mbpp": problem(1), "humaneval": function(0)}
FILES = {"exercism": "practice.jsonl", "mbpp": "mbpp.jsonl", "humaneval": "HumanEval.jsonl"}
BAD = [
    ("exercism", {"slug": 5}, "'slug' must be text"),
    ("exercism", {"stub_files": {}}, "a stub and a reference"),
    ("exercism", {"test_files": {"x_test.py": ""}}, "no test file ab_one_test.py"),
    ("exercism", {"test_files": {"ab_one_test.py": "def ("}}, "not Python"),
    ("mbpp", {"task_id": "7"}, "'task_id' must be a whole number"),
    ("mbpp", {"task_id": 975}, "1 to 974"),
    ("mbpp", {"code": "def add(:"}, "not Python"),
    ("mbpp", {"test_list": ["assert add(1, 2) == 3"]}, "two tests"),
    ("mbpp", {"test_list": ["add(1, 2)", "add(1, 2)"]}, "one assert"),
    ("mbpp", {"test_list": ["assert sub(1, 2) == 3"] * 2}, "sub"),
    ("mbpp", {"test_list": [1, 2]}, "a list of texts"),
    ("humaneval", {"entry_point": "sub"}, "'sub' is not defined"),
    ("humaneval", {"test": "def chek(candidate):\n    pass\n"}, "no check(candidate)"),
    ("humaneval", {"prompt": "def add(:\n"}, "not Python"),
]


@pytest.mark.parametrize("name,change,reason", BAD)
def test_malformed_row_is_refused_with_its_line(name, change, reason, tmp_path):
    first = {"slug": "other", "task_id": 2 if name == "mbpp" else "HumanEval/9"}
    good = GOOD[name] | {key: value for key, value in first.items() if key in GOOD[name]}
    if name == "exercism":
        good = exercise("other")
    source = lines(tmp_path / FILES[name], [good, GOOD[name] | change])
    with pytest.raises(Stop) as caught:
        load(name).main(["--source", str(source), "--output-dir", str(tmp_path / "out")])
    assert f"{source}, line 2" in str(caught.value) and reason in str(caught.value) and caught.value.code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("line,reason", [(b"{", "not JSON"), (b"[1]", "expected an object"), (b"\xff", "not UTF-8"),
                                         (b"{}", "is missing")])
def test_malformed_line_is_refused(name, line, reason, tmp_path):
    source = tmp_path / FILES[name]
    source.write_bytes(json.dumps(GOOD[name]).encode() + b"\n" + line + b"\n")
    with pytest.raises(Stop, match=reason) as caught:
        load(name).main(["--source", str(source), "--output-dir", str(tmp_path / "out")])
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_repeated_row_is_refused(name, tmp_path):
    source = lines(tmp_path / FILES[name], [GOOD[name], GOOD[name]])
    with pytest.raises(Stop, match="twice"):
        load(name).main(["--source", str(source), "--output-dir", str(tmp_path / "out")])


def test_command_line_says_what_is_wrong_and_exits_with_2(tmp_path):
    source = lines(tmp_path / "mbpp.jsonl", [problem(1), problem(975)])
    script = str(ROOT / "data" / "mbpp" / "prepare.py")
    for flags, words in ((["--source", str(source)], "line 2: task_id must be 1 to 974, got 975"),
                         (["--source", str(tmp_path / "none")], "no such file"), (["--workers", "0"], "1 or more"),
                         (["--sourc", "x"], "unrecognized")):
        command = [sys.executable, script, *flags, "--output-dir", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the real sources


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("name,count", [("mbpp", 974), ("humaneval", 164)])
def test_real_rows_are_read(name, count, tmp_path):
    module = load(name)
    rows = module.read_rows(module.code_tasks.get_args("", tmp_path, ["--source", str(DATA / name)]))
    assert len(rows) == count and len({row["id"] for row in rows}) == count
    assert all(row["expect_tests"]["hidden"] >= 1 and row["prompt"][0]["content"] for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_real_exercism_is_written_with_thirty_held_out(tmp_path):
    exercism.main(["--source", str(DATA / "exercism"), "--output-dir", str(tmp_path)])
    train, heldout = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert len(heldout) == 30 and len(train) >= 90
    assert not {row["id"] for row in train} & {row["id"] for row in heldout}
    for row in train + heldout:
        assert set(exercism.test_names(row["visible_tests"])).isdisjoint(exercism.test_names(row["hidden_tests"]))
    hidden = sum(row["expect_tests"]["hidden"] for row in train + heldout)
    total = hidden + sum(row["expect_tests"]["visible"] for row in train + heldout)
    assert 0.27 < hidden / total < 0.33
