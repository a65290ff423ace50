"""What the three prepare.py of code tasks share: reading a source, the build-time gate, writing task files.

A task row of exercism, mbpp and humaneval is one JSON object:

    id, task        "mbpp-11", "mbpp"
    prompt          [{"role": "user", "content": ...}]; asks for one whole Python module
    answer          source of the reference, a module that passes both parts of the tests
    stub            source of a module that has the right names and fails
    module, entry   name under which the tests import the candidate; the function's name, or null for a whole module
    visible_tests   source of a unittest module that a model may see; "" where there is none
    hidden_tests    source of a unittest module that decides; its tests are not among the visible ones
    expect_tests    {"visible": n, "hidden": m}: how many tests must report a pass
    helpers         {file name: text}: trusted modules that the tests import
    plain           whether the tests ask for plain data alone, so that a returned object is refused

so that the verdict on a reply's `code` is

    box.judge(code, row["hidden_tests"], module=row["module"], helpers=row["helpers"], plain=row["plain"],
              expect_tests=row["expect_tests"]["hidden"], limits=Limits.modules())

The gate keeps a row only when, through sandbox.py's own judge, its reference passes every part and its stub fails the
hidden one. Whatever goes is listed with its reason in gate.jsonl, and so is what stayed.
"""

import argparse
import gzip
import hashlib
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # sandbox.py lies at the top of the project
from sandbox import Limits, Sandbox, SandboxUnavailable  # noqa: E402

PARTS = ("visible", "hidden")


class Stop(Exception):
    """A fault that ends the script with one line on stderr; `code` is 2 for the caller's mistake and 1 for the rest."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


# ---------------------------------------------------------------------------------------------------------------------
# flags


def get_args(doc, here, argv=None):
    """Flags of a code data set's prepare.py; `here` is the folder of that script."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=None, metavar="PATH",
                        help="local copy to read, a file or a folder (default: download from the public source)")
    parser.add_argument("--output-dir", type=Path, default=here, help="folder to write (default: this script's own)")
    parser.add_argument("--limit", type=int, default=0, help="stop after this many source rows (a count; 0: all)")
    parser.add_argument("--workers", type=int, default=2, help="sandbox servers that judge at once (a count)")
    parser.add_argument("--timeout", type=float, default=120.0, help="most seconds that a download may stand still")
    parser.add_argument("--unsafe-sandbox", action="store_true",
                        help="judge the references without isolation where the sandbox is not available")
    args = parser.parse_args(argv)
    if args.source is not None and not args.source.exists():
        parser.error(f"--source {args.source}: no such file or folder")
    if args.output_dir.exists() and not args.output_dir.is_dir():
        parser.error(f"--output-dir must be a folder, {args.output_dir} is a file")
    if args.limit < 0:
        parser.error(f"--limit must be 0 or more rows, got {args.limit}; 0 takes all")
    if args.workers < 1:
        parser.error(f"--workers must be 1 or more, got {args.workers}; try 2")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# reading


def download(url, timeout):
    """Whole body of `url` in bytes; `timeout` is seconds without a byte. Raises Stop (code 1)."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            length, body = reply.headers.get("Content-Length"), reply.read()
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
        raise Stop(f"{url}: {error}; check the network, or give a local copy with --source", code=1) from error
    if length is not None and len(body) != int(length):
        raise Stop(f"{url}: got {len(body):,} of {int(length):,} bytes; run it again", code=1)
    return body


def read_source(args, url, name):
    """(bytes, where they are from). `--source` may be the file itself or a folder that holds `name`."""
    if args.source is None:
        raw, where = download(url, args.timeout), url
    else:
        path = args.source / name if args.source.is_dir() else args.source
        if not path.is_file():
            raise Stop(f"{path}: no such file; --source takes {name} or a folder that holds it")
        raw, where = path.read_bytes(), str(path)
    print(f"read     {where}  {len(raw):,} bytes  sha256 {hashlib.sha256(raw).hexdigest()}")
    return raw, where


def unzip(raw, where):
    """Bytes of a gzip file, or `raw` itself where it is none."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError) as error:
        raise Stop(f"{where}: broken gzip file ({error}); fetch it again") from error


def read_lines(raw, where):
    """JSON lines -> [(place, dict)]; place is "file, line n". Raises Stop for a malformed line."""
    rows = []
    # split on \n alone: U+2028 and its like may stand inside a JSON string
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        place = f"{where}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Stop(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from error
        except (ValueError, RecursionError) as error:
            raise Stop(f"{place}: not JSON ({error}): {line[:60]!r}") from error
        if not isinstance(row, dict):
            raise Stop(f"{place}: expected an object, got {type(row).__name__}")
        rows.append((place, row))
    return rows


def field(row, key, kind, place):
    """row[key], which must be of type `kind`. Raises Stop with the place and what was seen."""
    if key not in row:
        raise Stop(f"{place}: field {key!r} is missing; the row has {sorted(row)}")
    value = row[key]
    if type(value) is not kind or (kind is list and not all(type(item) is str for item in value)):
        wanted = "a list of texts" if kind is list else {str: "text", int: "a whole number", dict: "an object"}[kind]
        raise Stop(f"{place}: field {key!r} must be {wanted}, got {repr(value)[:80]}")
    return value


def unique(rows, key, place_of):
    """Raises Stop at the second row with the same `key`."""
    seen = {}
    for row in rows:
        if row[key] in seen:
            raise Stop(f"{place_of[row[key]]}: {key} {row[key]!r} stands there twice; give a source without repeats")
        seen[row[key]] = row


def syntax_fault(error):
    """A SyntaxError as a reason in one line."""
    return f"not Python ({error.msg}, line {error.lineno}): {(error.text or '').strip()[:60]!r}"


def rank(text):
    """A fixed number for a name, the same on every machine: order and splits come from it, never from random()."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# the gate


def job_of(row, part, code, plain):
    """The keywords of Sandbox.judge for one part of a row's tests."""
    return dict(code=code, tests=row[f"{part}_tests"], module=row["module"], expect_tests=row["expect_tests"][part],
                helpers=row["helpers"], plain=plain, limits=Limits.modules())


def judge_parts(rows, box, plain):
    """Judges every reference on both parts. Returns one list of reasons for each row, empty where it passes."""
    jobs = [(number, part, job_of(row, part, row["answer"], plain)) for number, row in enumerate(rows)
            for part in PARTS if row["expect_tests"][part]]
    reasons = [[] for _ in rows]
    for (number, part, _), result in zip(jobs, box.judge_many([job for *_, job in jobs]), strict=True):
        if not result.passed:
            reasons[number].append(f"reference, {part} tests: {result.status}: {result.message}")
    return reasons


def gate(rows, box):
    """
    Judges reference and stub of every row, and finds `plain`: the strict reading wherever the reference passes in it.
    Returns (kept rows, verdicts); a verdict is a line of gate.jsonl.
    """
    strict = judge_parts(rows, box, plain=True)
    objects = [number for number, reasons in enumerate(strict) if reasons]  # classes, iterators, or a failing reference
    loose = dict(zip(objects, judge_parts([rows[number] for number in objects], box, plain=False), strict=True))
    rows = [dict(row, plain=number not in loose) for number, row in enumerate(rows)]
    reasons = [loose.get(number, []) for number in range(len(rows))]
    # Only the hidden part: a stub that passes a visible test earns nothing. Not the strict reading: a stub that is a
    # whole program (ledger, a refactoring exercise) may return objects where the reference does not.
    stubs = box.judge_many([job_of(row, "hidden", row["stub"], plain=False) for row in rows])
    for reason, result in zip(reasons, stubs, strict=True):
        reason += ["the stub passes the hidden tests"] if result.passed else []
    verdicts = [{"id": row["id"], "kept": not reason, "reason": "; ".join(reason)}
                for row, reason in zip(rows, reasons, strict=True)]
    return [row for row, verdict in zip(rows, verdicts, strict=True) if verdict["kept"]], verdicts


def open_box(args):
    """The sandbox that judges, a context manager. Raises Stop where there is none."""
    try:
        box = Sandbox(workers=args.workers, unsafe=args.unsafe_sandbox)
    except SandboxUnavailable as error:
        raise Stop(f"{error}; --unsafe-sandbox judges the references without isolation", code=1) from error
    print(f"sandbox  tier {box.tier}, {args.workers} workers")
    return box


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write_all(folder, files, verdicts):
    """{name: rows} and the gate's verdicts -> JSON lines in `folder`: all files appear, or the old ones stay."""
    folder.mkdir(parents=True, exist_ok=True)
    bodies = {name: "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode()
              for name, rows in {**files, "gate.jsonl": verdicts}.items()}
    parts = {name: folder / f".part-{os.getpid()}-{name}" for name in bodies}
    try:
        for name, body in bodies.items():
            with open(parts[name], "wb") as f:
                f.write(body)
                f.flush()
                os.fsync(f.fileno())
        for name in bodies:
            os.replace(parts[name], folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    for verdict in verdicts:
        if not verdict["kept"]:
            print(f"left out {verdict['id']}: {verdict['reason'][:120]}")
    for name, body in bodies.items():
        digest = hashlib.sha256(body).hexdigest()
        print(f"wrote    {name:<18}{body.count(10):>6,} rows {len(body):>10,} bytes  sha256 {digest}")


def run(main):
    """Calls main() and turns what stops it into one line on stderr and an exit code."""
    try:
        main()
    except Stop as stop:
        print(f"prepare.py: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except OSError as error:  # a full disk, a folder that cannot be read or written
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(1)
