"""Exercism's Python track (practice exercises) as task files: whole modules with visible and hidden tests.

    python data/exercism/prepare.py                              # from the track's repository, at a fixed commit
    python data/exercism/prepare.py --source practice.jsonl      # rows already collected, or a folder that holds them
    python data/exercism/prepare.py --source python-main         # a checkout of the repository, or its .tar.gz

Written: train.jsonl, heldout.jsonl and gate.jsonl.
1. Deprecated exercises and those with one test only are left out, and what the gate refuses.
2. The tests of an exercise are split 70/30 into visible and hidden ones, by a fixed hash of each test's name.
3. 30 exercises are held out (heldout.jsonl), by a fixed hash of the exercise's name: the first 30 that the gate keeps.
Rows as data/code_tasks.py says, with the difficulty (1 to 10) and the reference's length in lines that are not blank.
Last line to expect: `wrote exercism to ...`.
"""

import ast
import io
import json
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import code_tasks  # noqa: E402
from code_tasks import Stop, field  # noqa: E402

URL = "https://github.com/exercism/python/archive/9eb657d4.tar.gz"
HIDDEN_SHARE = 0.3
HELD_OUT = 30
DOCS = ("introduction", "instructions", "instructions.append")


# ---------------------------------------------------------------------------------------------------------------------
# reading: JSON lines, or the repository's own tree


def tree_of(raw, where):
    """A .tar.gz of the repository -> {path without the archive's first folder: text}."""
    tree = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                if member.isfile() and (name == "config.json" or name.startswith("exercises/practice/")):
                    tree[name] = archive.extractfile(member).read().decode("utf-8")
    except (tarfile.TarError, OSError, EOFError, UnicodeDecodeError) as error:
        raise Stop(f"{where}: not a .tar.gz of the track ({error}); fetch it again") from error
    return tree


def folder_tree(folder):
    """A checkout of the repository -> {path: text}."""
    paths = [folder / "config.json", *sorted((folder / "exercises" / "practice").rglob("*"))]
    try:
        return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths if path.is_file()}
    except UnicodeDecodeError as error:
        raise Stop(f"{folder}: a file of the track is not UTF-8 ({error})") from error


def parse_json(tree, name, where):
    if name not in tree:
        raise Stop(f"{where}: no file {name}; give a checkout of the track, its .tar.gz, or practice.jsonl")
    try:
        return json.loads(tree[name])
    except ValueError as error:
        raise Stop(f"{where}, {name}: not JSON ({error})") from error


def collect(tree, where):
    """The repository's tree -> [(place, source row)], one for each practice exercise of config.json."""
    rows = []
    try:
        for exercise in parse_json(tree, "config.json", where)["exercises"]["practice"]:
            slug = exercise["slug"]
            base = f"exercises/practice/{slug}"
            files = parse_json(tree, f"{base}/.meta/config.json", where)["files"]
            docs = [tree.get(f"{base}/.docs/{name}.md", "") for name in DOCS]
            rows.append((f"{where}, {base}", {
                "slug": slug,
                "status": exercise.get("status", "active"),
                "difficulty": exercise["difficulty"],
                "instructions": "\n\n".join(text.strip() for text in docs if text.strip()),
                "stub_files": {name: tree[f"{base}/{name}"] for name in files["solution"]},
                # "editor" files are shown beside the stub and used by the tests
                "test_files": {name: tree[f"{base}/{name}"] for name in files["test"] + files.get("editor", [])},
                "reference_files": {files["solution"][0]: tree[f"{base}/{files['example'][0]}"]},
            }))
    except KeyError as error:
        raise Stop(f"{where}: {error} is missing in config.json or in the tree of an exercise") from error
    return rows


def read_rows(args):
    """[(place, source row)] from whichever form the source has."""
    if args.source is not None and args.source.is_dir() and not (args.source / "practice.jsonl").exists():
        print(f"read     {args.source}")
        return collect(folder_tree(args.source), str(args.source))
    raw, where = code_tasks.read_source(args, URL, "practice.jsonl")
    return collect(tree_of(raw, where), where) if raw[:2] == b"\x1f\x8b" else code_tasks.read_lines(raw, where)


# ---------------------------------------------------------------------------------------------------------------------
# splitting the tests


def is_test(node):
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def test_names(source):
    """["Class.test_name"] of a unittest module, in its order, without those that it skips itself (extra credit)."""
    def skipped(node):
        return any(ast.unparse(d).startswith(("unittest.skip(", "skip(")) for d in node.decorator_list)

    return [f"{cls.name}.{node.name}" for cls in ast.parse(source).body if isinstance(cls, ast.ClassDef)
            for node in cls.body if is_test(node) and not skipped(node)]


def keep_tests(source, keep):
    """The unittest module `source` without the test methods that are not in `keep`; all other lines stay."""
    lines = source.split("\n")  # as ast counts lines; splitlines() also splits at form feeds
    for cls in ast.parse(source).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        gone = [node for node in cls.body if is_test(node) and f"{cls.name}.{node.name}" not in keep]
        for node in gone:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines[first - 1:node.end_lineno] = [None] * (node.end_lineno - first + 1)
        if gone and len(gone) == len(cls.body):  # a class needs a body
            lines[gone[0].lineno - 1] = " " * gone[0].col_offset + "pass"
    return "\n".join(line for line in lines if line is not None)


def split_names(slug, names):
    """(visible, hidden) sets of test names: the lowest 30% by hash are hidden, one at least."""
    ranked = sorted(names, key=lambda name: code_tasks.rank(f"{slug}/{name}"))
    cut = max(1, round(HIDDEN_SHARE * len(ranked)))
    return set(ranked[cut:]), set(ranked[:cut])


# ---------------------------------------------------------------------------------------------------------------------
# the rows


def make_row(row, place):
    """One source row -> one task row, or a reason (str) why there is none. Raises Stop for a malformed row."""
    slug, status, text = (field(row, key, str, place) for key in ("slug", "status", "instructions"))
    stubs, tests, references = (field(row, key, dict, place) for key in ("stub_files", "test_files", "reference_files"))
    difficulty = field(row, "difficulty", int, place)
    if len(stubs) != 1 or list(stubs) != list(references):
        raise Stop(f"{place}: a stub and a reference of the same name are needed, got {[*stubs]} and {[*references]}")
    name = next(iter(stubs))
    module = name.removesuffix(".py")
    if f"{module}_test.py" not in tests or not module.isidentifier():
        raise Stop(f"{place}: no test file {module}_test.py among {list(tests)}")
    source, answer = (s.replace("\r\n", "\n") for s in (tests[f"{module}_test.py"], references[name]))
    if status == "deprecated":
        return "deprecated upstream"
    try:
        names = test_names(source)
    except SyntaxError as error:
        raise Stop(f"{place}, {module}_test.py: {code_tasks.syntax_fault(error)}") from error
    if len(names) < 2:
        return f"{len(names)} test: nothing to hide"
    visible, hidden = split_names(slug, names)
    prompt = (f"{text.strip()}\n\nWrite the module {name}. It starts as:\n\n```python\n{stubs[name].strip()}\n```\n\n"
              "Reply with the whole module in one Python code block.")
    return {
        "id": f"exercism-{slug}",
        "prompt": [{"role": "user", "content": prompt}],
        "answer": answer,
        "task": "exercism",
        "module": module,
        "entry": None,
        "stub": stubs[name],
        "visible_tests": keep_tests(source, visible),
        "hidden_tests": keep_tests(source, hidden),
        "expect_tests": {"visible": len(visible), "hidden": len(hidden)},
        "helpers": {other: body for other, body in tests.items() if other != f"{module}_test.py"},
        "difficulty": difficulty,
        "reference_lines": sum(bool(line.strip()) for line in answer.splitlines()),
    }


def hold_out(rows):
    """(train, heldout) by the hash of the exercise's name; a source of less than 60 exercises gives half."""
    ranked = sorted(rows, key=lambda row: code_tasks.rank(f"heldout/{row['id']}"))
    held = {row["id"] for row in ranked[: min(HELD_OUT, len(rows) // 2)]}
    return [row for row in rows if row["id"] not in held], [row for row in rows if row["id"] in held]


def get_args(argv=None):
    return code_tasks.get_args(__doc__, HERE, argv)


def main(argv=None):
    args = get_args(argv)
    rows, verdicts, places = [], [], {}
    for place, source in read_rows(args)[: args.limit or None]:
        row = make_row(source, place)
        if isinstance(row, str):
            verdicts.append({"id": f"exercism-{source['slug']}", "kept": False, "reason": row})
        else:
            rows.append(row)
            places[row["id"]] = place
    code_tasks.unique(rows, "id", places)
    with code_tasks.open_box(args) as box:
        kept, judged = code_tasks.gate(rows, box)
    train, heldout = hold_out(kept)
    code_tasks.write_all(args.output_dir, {"train.jsonl": train, "heldout.jsonl": heldout}, verdicts + judged)
    print(f"wrote exercism to {args.output_dir}")


if __name__ == "__main__":
    code_tasks.run(main)
