"""HumanEval (Chen et al. 2021) as a task file for code environments: an evaluation, never a training set.

    python data/humaneval/prepare.py                                  # from the authors' repository
    python data/humaneval/prepare.py --source HumanEval.jsonl.gz      # a local copy, or a folder that holds it

Written: test.jsonl and gate.jsonl. The hidden test is the source's check() in one method. The visible tests are those
`>>>` examples of the prompt that are plain values, where there are any. Rows as data/code_tasks.py says.
Last line to expect: `wrote HumanEval to ...`.
"""

import ast
import doctest
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import code_tasks  # noqa: E402
from code_tasks import Stop, field  # noqa: E402

URL = "https://github.com/openai/human-eval/raw/master/data/HumanEval.jsonl.gz"
MODULE = "solution"


def examples(prompt, entry):
    """[(expression, value)] sources of the prompt's `>>>` examples that call `entry` and show a literal."""
    node = next(n for n in ast.parse(prompt).body if isinstance(n, ast.FunctionDef) and n.name == entry)
    try:
        found = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
    except ValueError:  # `>>>` in a layout that doctest does not read: no examples then
        return []
    pairs = []
    for example in found:
        try:
            call = ast.parse(example.source.strip(), mode="eval")
            value = ast.literal_eval(example.want.strip())
        except (SyntaxError, ValueError):  # a statement, a traceback, a value in words
            continue
        if any(isinstance(n, ast.Name) and n.id == entry for n in ast.walk(call)):
            pairs.append((ast.unparse(call), repr(value)))
    return pairs


def visible_module(pairs, entry):
    lines = ["import unittest", "", f"from {MODULE} import {entry}", "", "", "class ExampleTest(unittest.TestCase):"]
    for number, (call, value) in enumerate(pairs):
        lines += [f"    def test_{number}(self):", f"        self.assertEqual({call}, {value})", ""]
    return "\n".join(lines).rstrip() + "\n" if pairs else ""


def hidden_module(test, entry, names):
    lines = ["import unittest", "", f"from {MODULE} import {', '.join(names)}", "", test.strip(), "", "",
             "class HumanEvalTest(unittest.TestCase):", "    def test_check(self):", f"        check({entry})"]
    return "\n".join(lines) + "\n"


def make_row(row, place):
    """One source row -> one task row. Raises Stop with the place for a row that is not as published."""
    keys = ("task_id", "prompt", "canonical_solution", "entry_point", "test")
    name, prompt, solution, entry, test = (field(row, key, str, place) for key in keys)
    try:
        body, tree = ast.parse(prompt + solution).body, ast.parse(test)
    except SyntaxError as error:
        raise Stop(f"{place}: {code_tasks.syntax_fault(error)}") from error
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if entry not in defined:
        raise Stop(f"{place}: entry_point {entry!r} is not defined by prompt and canonical_solution")
    if "check" not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        raise Stop(f"{place}: the test defines no check(candidate)")
    # four checks use another function of the prompt's module beside the candidate (tasks 32, 33, 38, 50)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & defined
    pairs = examples(prompt + solution, entry)
    return {
        "id": name.replace("/", "-").lower(),
        "prompt": [{"role": "user", "content": f"Complete this Python module.\n\n```python\n{prompt.strip()}\n```\n\n"
                                               "Reply with the whole module in one Python code block."}],
        "answer": prompt + solution,
        "task": "humaneval",
        "module": MODULE,
        "entry": entry,
        "stub": prompt.rstrip() + "\n    pass\n",
        "visible_tests": visible_module(pairs, entry),
        "hidden_tests": hidden_module(test, entry, sorted(used | {entry})),
        "expect_tests": {"visible": len(pairs), "hidden": 1},
        "helpers": {},
        "examples": pairs,
    }


def drop_wrong_examples(rows, box):
    """Keeps the examples that the reference itself meets: a prompt may round, or show the output of print()."""
    for row in rows:
        if row["examples"]:
            result = box.judge(row["answer"], row["visible_tests"], module=MODULE, expect_tests=len(row["examples"]),
                               limits=code_tasks.Limits.modules())
            # a module that did not run reports no test at all, and then no example is kept
            pairs = [pair for pair, right in zip(row["examples"], result.per_test) if right]
            row["visible_tests"] = visible_module(pairs, row["entry"])
            row["expect_tests"] = dict(row["expect_tests"], visible=len(pairs))
        del row["examples"]
    return rows


def read_rows(args):
    raw, where = code_tasks.read_source(args, URL, "HumanEval.jsonl.gz")
    sources = code_tasks.read_lines(code_tasks.unzip(raw, where), where)[: args.limit or None]
    rows = [make_row(row, place) for place, row in sources]
    code_tasks.unique(rows, "id", {row["id"]: place for row, (place, _) in zip(rows, sources, strict=True)})
    return rows


def get_args(argv=None):
    return code_tasks.get_args(__doc__, HERE, argv)


def main(argv=None):
    args = get_args(argv)
    rows = read_rows(args)
    with code_tasks.open_box(args) as box:
        kept, verdicts = code_tasks.gate(drop_wrong_examples(rows, box), box)
    code_tasks.write_all(args.output_dir, {"test.jsonl": kept}, verdicts)
    print(f"wrote HumanEval to {args.output_dir}")


if __name__ == "__main__":
    code_tasks.run(main)
