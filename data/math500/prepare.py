"""MATH-500 (competition problems, five levels) as a task file, used as an out-of-domain test.

    python data/math500/prepare.py                                  # from the hub: HuggingFaceH4/MATH-500, test
    python data/math500/prepare.py --source ../shared/data/math500  # a folder that holds test.jsonl
    python data/math500/prepare.py --levels 1 2 3 4 5

Written to this folder: test.jsonl (a task file) and prepared.json (rows and hashes). Levels 1 and 2, the default, are
the 133 easiest problems.

A source row has "problem", "answer", "subject", "level" and more. The answer is LaTeX (a fraction, a root, an interval,
a word), so it stays as it is and is compared as a value when a reply is graded.
Everything is read and checked before the first file is written, and files appear whole or not at all.
Last line to expect: `wrote MATH-500, levels 1 2, to ...`.
"""

import argparse
import hashlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
HUB = ("HuggingFaceH4/MATH-500", None)
ROWS = 500  # rows of the released file
INSTRUCTION = "\nEnd with #### and the answer."  # the same text in every set whose answers are marked this way


class Stop(Exception):
    """A fault that ends the script with one line on stderr; `code` is 2 for the caller's mistake and 1 for the rest."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


# ---------------------------------------------------------------------------------------------------------------------
# flags


def get_args(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default=None, metavar="PATH_OR_URL",
                        help="folder or http(s) address that holds test.jsonl (default: the hub)")
    parser.add_argument("--levels", type=int, nargs="+", choices=range(1, 6), default=[1, 2], metavar="1..5",
                        help="levels of difficulty to keep (1 is the easiest; default: 1 2)")
    parser.add_argument("--output-dir", type=Path, default=HERE, help="folder to write (default: this script's own)")
    parser.add_argument("--timeout", type=float, default=120.0, help="most seconds that one try of a download may take")
    parser.add_argument("--retries", type=int, default=4, help="further tries after a download that failed (a count)")
    parser.add_argument("--backoff", type=float, default=1.0, help="seconds before the first retry; doubles each time")
    args = parser.parse_args(argv)
    if args.output_dir.exists() and not args.output_dir.is_dir():
        parser.error(f"--output-dir must be a folder, {args.output_dir} is a file")
    if args.source is not None and Path(args.source).resolve() == args.output_dir.resolve():
        parser.error(f"--source and --output-dir are both {args.source}: the source files would be overwritten")
    if not 0 < args.timeout < float("inf"):
        parser.error(f"--timeout must be a number of seconds above 0, got {args.timeout}; try 120")
    if args.retries < 0:
        parser.error(f"--retries must be 0 or more, got {args.retries}; try 4")
    if not 0 <= args.backoff < float("inf"):
        parser.error(f"--backoff must be 0 seconds or more, got {args.backoff}; try 1")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# reading: hub, folder or address -> bytes of JSON lines (this section is the same text in data/gsm8k/prepare.py)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_hub(name, config, split):
    """A split of a hub data set -> bytes, one JSON object a line, as the released .jsonl files spell them."""
    try:
        import datasets
    except ImportError as error:
        raise Stop("needs package datasets: run `pip install datasets`, or give a local copy with --source") from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    # no network, no such set, a server's refusal, a disk that fills up
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise Stop(f"{name}: the hub gave no {split} split: {first_line(error)}; "
                   "check the network, or give a local copy with --source", code=1) from error
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_folder(folder, name):
    path = Path(folder) / name
    if not path.is_file():
        raise Stop(f"{path}: no such file; --source takes a folder that holds {name}, or an http(s) address")
    return path.read_bytes()


def read_url(url, timeout, retries, backoff):
    """Whole body of an http(s) address, in bytes.

    A short read, a dead or silent server, 429 and 5xx are tried again after `backoff` seconds, then twice that, and so
    on (a server's Retry-After counts where it is longer, up to a minute); any other status ends the script at once.
    `timeout` is seconds for a whole try: a socket's own timeout never fires on a server that sends a byte a second.
    """
    for attempt in range(retries + 1):
        wait = backoff * 2**attempt
        deadline = time.monotonic() + timeout
        try:
            with urllib.request.urlopen(url, timeout=timeout) as reply:
                expected, body = reply.headers.get("Content-Length"), b""
                while chunk := reply.read1(1 << 16):
                    body += chunk
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"timed out after {timeout:g} s with {len(body):,} bytes")
            # read1 ends quietly where the connection closed early, so the promised length has to be compared
            if expected is None or len(body) == int(expected):
                return body
            fault = f"got {len(body):,} of {int(expected):,} bytes"
        except urllib.error.HTTPError as error:
            fault = f"HTTP {error.code} {error.reason}"
            error.close()
            if error.code != 429 and error.code < 500:
                raise Stop(f"{url}: {fault}; check the address given with --source") from error
            asked = error.headers.get("Retry-After", "")
            wait = max(wait, min(int(asked), 60)) if asked.isdigit() else wait
        except (http.client.HTTPException, OSError) as error:  # URLError, a reset and a timeout are OSErrors
            fault = first_line(error)
        except ValueError as error:  # an address that is none
            raise Stop(f"{url}: {first_line(error)}; check the address given with --source") from error
        if attempt < retries:
            print(f"{url}: {fault}; trying again in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
    raise Stop(f"{url}: {fault}, {retries + 1} times; nothing was written", code=1)


def read_rows(raw, where):
    """bytes of JSON lines -> [(place, dict)]; place is "file, line n". Raises Stop for a malformed line."""
    lines = raw.split(b"\n")  # not splitlines: U+2028 and its like may stand inside a JSON string
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise Stop(f"{where}: no rows")
    rows = []
    for number, line in enumerate(lines, 1):
        place = f"{where}, line {number}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Stop(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from error
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # a JSONDecodeError, or a number or a nesting without end
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise Stop(f"{place}: not JSON ({reason}): {text[:60]!r}") from error
        if not isinstance(row, dict):
            raise Stop(f"{place}: expected an object, got {type(row).__name__}")
        rows.append((place, row))
    return rows


def text_field(row, key, place):
    """row[key], which must be text. Raises Stop with the place and what was seen."""
    if key not in row:
        raise Stop(f"{place}: field {key!r} is missing; the row has {sorted(row)}")
    if not isinstance(row[key], str) or not row[key].strip():
        raise Stop(f"{place}: field {key!r} must be text, got {repr(row[key])[:80]}")
    if any("\ud800" <= c <= "\udfff" for c in row[key]):
        raise Stop(f"{place}: field {key!r} holds half a surrogate pair, which is no text")
    return row[key]


# ---------------------------------------------------------------------------------------------------------------------
# writing: all files or none (the same text in data/gsm8k/prepare.py)


def write_all(folder, files):
    """{name: bytes} -> files in `folder`. The disk fills or the run dies: the old files stay as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: folder / f".part-{os.getpid()}-{name}" for name in files}
    try:
        for name, body in files.items():
            with open(parts[name], "wb") as f:
                f.write(body)
                f.flush()
                os.fsync(f.fileno())
        for name in files:
            os.replace(parts[name], folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def to_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def describe(body):
    return {"rows": body.count(b"\n"), "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}


# ---------------------------------------------------------------------------------------------------------------------
# the rows


def make_task(row, place, row_id):
    """One source row -> one task row. Raises Stop for a level that is not 1 to 5.

    {"problem": "What is $1/2+1/4$?", "answer": "\\\\frac34", "subject": "Prealgebra", "level": 1, ...} becomes
    {"prompt": [{"role": "user", "content": "What is $1/2+1/4$?\\nEnd with #### and the answer."}],
     "answer": "\\\\frac34", "task": "math500", "level": 1, "subject": "Prealgebra", ...}.
    """
    level = row.get("level")
    if type(level) is not int or not 1 <= level <= 5:  # type, because True is an int
        raise Stop(f"{place}: field 'level' must be a whole number from 1 to 5, got {repr(level)[:80]}")
    return {
        "id": row_id,
        "prompt": [{"role": "user", "content": text_field(row, "problem", place) + INSTRUCTION}],
        "answer": text_field(row, "answer", place),
        "task": "math500",
        "level": level,
        "subject": text_field(row, "subject", place),
    }


def main(argv=None):
    args = get_args(argv)
    name = "test.jsonl"
    if args.source is None:
        where, raw = f"{HUB[0]} test", read_hub(*HUB, "test")
    elif args.source.startswith(("http://", "https://")):
        where = f"{args.source.rstrip('/')}/{name}"
        raw = read_url(where, args.timeout, args.retries, args.backoff)
    else:
        where, raw = str(Path(args.source) / name), read_folder(args.source, name)
    rows = read_rows(raw, where)
    if len(rows) != ROWS:
        print(f"note: {where} has {len(rows):,} rows, the released file {ROWS:,}", file=sys.stderr)
    # Every row is checked, whatever its level. Ids count from 0 in the order of the source, before the choice of
    # levels, so that they name the same problem in every choice.
    tasks = [make_task(row, place, f"math500-test-{i:05d}") for i, (place, row) in enumerate(rows)]
    levels = sorted(set(args.levels))
    kept = [task for task in tasks if task["level"] in levels]
    if not kept:
        raise Stop(f"{where}: no problem has level {' or '.join(map(str, levels))}")

    written = to_lines(kept)
    record = {
        # rows from the list, since a file may lack its last newline
        "source": {name: {"from": where} | describe(raw) | {"rows": len(rows)}},
        "written": {name: describe(written)},
        "levels": {str(level): sum(task["level"] == level for task in kept) for level in levels},
    }
    # prepared.json last, so that its hashes never describe files that are not there yet
    write_all(args.output_dir, {name: written, "prepared.json": (json.dumps(record, indent=2) + "\n").encode()})

    for kind in ("source", "written"):
        row = record[kind][name]
        print(f"{kind:<8}{name:<16}{row['rows']:>7,} rows {row['bytes']:>11,} bytes  sha256 {row['sha256']}")
    print("rows of level " + ", ".join(f"{level}: {count}" for level, count in record["levels"].items()))
    print(f"wrote MATH-500, levels {' '.join(map(str, levels))}, to {args.output_dir}")


if __name__ == "__main__":
    try:
        main()
    except Stop as stop:
        print(f"prepare.py: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except OSError as error:  # a full disk, a folder that cannot be read or written
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(1)
