"""MBPP (Mostly Basic Python Problems, Austin et al. 2021) as task files for code environments.

    python data/mbpp/prepare.py                               # from the authors' repository
    python data/mbpp/prepare.py --source mbpp.jsonl           # a local copy, or a folder that holds it

Written: fewshot.jsonl (task_id 1-10), test.jsonl (11-510), validation.jsonl (511-600), train.jsonl (601-974), which are
the splits as published, and gate.jsonl. Each `assert` of the source becomes one test method: the first is shown in the
prompt and is the visible test, the others and the challenge tests are hidden. Rows as data/code_tasks.py says.
Last line to expect: `wrote MBPP to ...`.
"""

import ast
import builtins
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import code_tasks  # noqa: E402
from code_tasks import Stop, field  # noqa: E402

URL = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/mbpp.jsonl"
# first and last task_id of each
SPLITS = {"fewshot": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
MODULE = "solution"


def names_bound(tree):
    """({names of functions, classes and variables}, [import statements]) at the top of a module."""
    bound, imports = set(), []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        bound |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return bound, imports


def names_used(sources):
    return {node.id for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def test_module(asserts, setup, names, imports):
    """Source of a unittest module with one test per assert statement.

    The setup code of the source uses classes of the solution (tasks 367 and 927), so it stands after the import.
    """
    lines = ["import unittest", *imports, "", f"from {MODULE} import {', '.join(names)}", "", *setup.splitlines(), "",
             "", "class MbppTest(unittest.TestCase):"]
    for number, text in enumerate(asserts):
        # ast.unparse, not the text: a statement over several lines would need another indentation
        lines += [f"    def test_{number}(self):", f"        {ast.unparse(ast.parse(text))}", ""]
    return "\n".join(lines).rstrip() + "\n"


def make_row(row, place):
    """One source row -> one task row. Raises Stop with the place for a row that is not as published."""
    number = field(row, "task_id", int, place)
    code, text = (field(row, key, str, place).replace("\r\n", "\n") for key in ("code", "text"))
    setup = field(row, "test_setup_code", str, place).replace("\r\n", "\n")
    tests = field(row, "test_list", list, place) + field(row, "challenge_test_list", list, place)
    if not 1 <= number <= 974:
        raise Stop(f"{place}: task_id must be 1 to 974, got {number}")
    if len(tests) < 2:
        raise Stop(f"{place}: a task needs two tests or more, one to show and one to hide; got {len(tests)}")
    try:
        bound, imports = names_bound(ast.parse(code))
        setup_bound, _ = names_bound(ast.parse(setup))
        used = names_used([*tests, setup]) - setup_bound
        for test in tests:
            if [type(node) for node in ast.parse(test).body] != [ast.Assert]:
                raise Stop(f"{place}: a test must be one assert statement, got {test[:80]!r}")
    except SyntaxError as error:
        raise Stop(f"{place}: {code_tasks.syntax_fault(error)}") from error
    names = sorted(used & bound)  # a solution may shadow a builtin (task 126 defines sum)
    unknown = used - bound - set(dir(builtins)) - {a.asname or a.name for node in imports for a in node.names}
    if unknown or not names:
        raise Stop(f"{place}: the tests use {sorted(unknown or used)}, which the code does not define")
    # a module that the tests borrow from the solution (task 596 uses its sys) is imported by the tests themselves
    lines = [ast.unparse(node) for node in imports if used & {a.asname or a.name for a in node.names}]
    # the first name that a test calls, which is the function asked for; helper classes come along in `names`
    calls = [node.func for node in ast.walk(ast.parse(tests[0])) if isinstance(node, ast.Call)]
    entry = next((call.id for call in calls if isinstance(call, ast.Name) and call.id in names), names[0])
    shown, hidden = tests[:1], tests[1:]
    prompt = (f"{text.strip()}\nYour code should pass this test:\n\n{shown[0].strip()}\n\n"
              "Reply with the whole module in one Python code block.")
    return {
        "id": f"mbpp-{number}",
        "prompt": [{"role": "user", "content": prompt}],
        "answer": code.rstrip() + "\n",
        "task": "mbpp",
        "module": MODULE,
        "entry": entry,
        "stub": "".join(f"def {name}(*args, **kwargs):\n    pass\n" for name in names),
        "visible_tests": test_module(shown, setup, names, lines),
        "hidden_tests": test_module(hidden, setup, names, lines),
        "expect_tests": {"visible": len(shown), "hidden": len(hidden)},
        "helpers": {},
        "task_id": number,
    }


def read_rows(args):
    raw, where = code_tasks.read_source(args, URL, "mbpp.jsonl")
    sources = code_tasks.read_lines(raw, where)[: args.limit or None]
    rows = [make_row(row, place) for place, row in sources]
    code_tasks.unique(rows, "task_id", {row["task_id"]: place for row, (place, _) in zip(rows, sources, strict=True)})
    return rows


def get_args(argv=None):
    return code_tasks.get_args(__doc__, HERE, argv)


def main(argv=None):
    args = get_args(argv)
    rows = read_rows(args)
    with code_tasks.open_box(args) as box:
        kept, verdicts = code_tasks.gate(rows, box)
    files = {f"{split}.jsonl": [row for row in kept if low <= row["task_id"] <= high]
             for split, (low, high) in SPLITS.items()}
    code_tasks.write_all(args.output_dir, files, verdicts)
    print(f"wrote MBPP to {args.output_dir}")


if __name__ == "__main__":
    code_tasks.run(main)
