"""GSM8K (grade-school word problems) as task files, and as a textbook for a supervised warm start.

    python data/gsm8k/prepare.py                                  # from the hub: openai/gsm8k, main
    python data/gsm8k/prepare.py --source ../shared/data/gsm8k    # a folder that holds train.jsonl and test.jsonl
    python data/gsm8k/prepare.py --source https://example.org/gsm8k

Written to this folder: train.jsonl and test.jsonl (task files), sft.jsonl and sft-valid.jsonl (the training problems
with their worked solutions; the last 5% of train.jsonl are the validation part), prepared.json (rows and hashes). With
--labbook FILE the same goes into the lab book as a `data` record.

A source row {"question", "answer"} has a solution such as "48/2 = <<48/2=24>>24 clips\\n#### 24". The calculator marks
<<..>> go, because no calculator stands behind our prompts, and so do the thousands commas of the final number.
Everything is read and checked before the first file is written, and files appear whole or not at all.
Last line to expect: `wrote GSM8K to ...`.
"""

import argparse
import hashlib
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
HUB = ("openai/gsm8k", "main")
SPLITS = {"train": 7473, "test": 1319}  # rows of the released files
INSTRUCTION = "\nEnd with #### and the answer."  # the same text in every set whose answers are marked this way
VALID_SHARE = 20  # one row in 20 of train.jsonl, from its end, is the textbook's validation part


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
                        help="folder or http(s) address that holds train.jsonl and test.jsonl (default: the hub)")
    parser.add_argument("--output-dir", type=Path, default=HERE, help="folder to write (default: this script's own)")
    parser.add_argument("--timeout", type=float, default=120.0, help="most seconds that one try of a download may take")
    parser.add_argument("--retries", type=int, default=4, help="further tries after a download that failed (a count)")
    parser.add_argument("--backoff", type=float, default=1.0, help="seconds before the first retry; doubles each time")
    parser.add_argument("--labbook", default=None, metavar="FILE", help="lab book for a record of rows and hashes")
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
# reading: hub, folder or address -> bytes of JSON lines (this section is the same text in data/math500/prepare.py)


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
# writing: all files or none (the same text in data/math500/prepare.py)


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
    """One source row -> one task row.

    {"question": "How many?", "answer": "6*2=<<6*2=12>>12\\n12*100=<<12*100=1200>>1,200\\n#### 1,200"} becomes
    {"prompt": [{"role": "user", "content": "How many?\\nEnd with #### and the answer."}], "answer": "1200",
     "solution": "6*2=12\\n12*100=1,200\\n#### 1200", ...}.
    """
    question, worked = text_field(row, "question", place), text_field(row, "answer", place)
    steps, mark, last = worked.rpartition("\n#### ")
    if not mark or not re.fullmatch(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", last.strip(), flags=re.ASCII):
        raise Stop(f"{place}: the answer must end in a line '#### NUMBER', got {worked[-40:]!r}")
    answer = last.strip().replace(",", "")
    steps = re.sub(r"<<[^<>]*>>", "", steps)
    if "<<" in steps or ">>" in steps or "####" in steps:
        raise Stop(f"{place}: the solution holds a broken calculator mark or a second ####: {steps[:80]!r}")
    return {
        "id": row_id,
        "prompt": [{"role": "user", "content": question + INSTRUCTION}],
        "answer": answer,
        "task": "gsm8k",
        "solution": f"{steps}\n#### {answer}",
    }


def make_lesson(task):
    """Task row -> textbook row, whose completion is what the trained tokens spell."""
    return {"prompt": task["prompt"], "completion": [{"role": "assistant", "content": task["solution"]}]}


def record_in(labbook, folder, record, wall_s=None):
    """A `data` record of what was read and written; with record None the lab book is only tried. Raises Stop."""
    sys.path.insert(0, str(HERE.parents[1]))
    import common  # only here: without a lab book the script needs no package

    try:
        common.check_writable(labbook)
        if record:
            common.append_record(labbook, {
                "kind": "data", "run_id": f"gsm8k-{time.strftime('%y%m%d-%H%M%S')}", "parent": None,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "script": "data/gsm8k/prepare", "arm": None,
                "task": "gsm8k", "model": {"name": None}, "data": [
                    {"path": common.short_path(folder / name), "sha256": row["sha256"], "rows": row["rows"]}
                    for name, row in record["written"].items()],
                "seed": None, "config": {"source": record["source"]}, "budget": {"wall_s": round(wall_s, 1)},
                "losses": {}, "scores": {}, "status": "ok", "git": common.git_state(), "versions": common.versions(),
                "device": None, "notes": ""}, f"- {time.strftime('%Y-%m-%d %H:%M')} data gsm8k, "
                + ", ".join(f"{row['rows']} rows of {name}" for name, row in record["written"].items()))
    except common.UserError as error:
        raise Stop(str(error)) from error


def main(argv=None):
    args, start = get_args(argv), time.time()
    if args.labbook:
        record_in(args.labbook, args.output_dir, None)  # refused before a download, not after
    sources, tasks = {}, {}
    for split in SPLITS:
        name = f"{split}.jsonl"
        if args.source is None:
            where, raw = f"{HUB[0]} {split}", read_hub(*HUB, split)
        elif args.source.startswith(("http://", "https://")):
            where = f"{args.source.rstrip('/')}/{name}"
            raw = read_url(where, args.timeout, args.retries, args.backoff)
        else:
            where, raw = str(Path(args.source) / name), read_folder(args.source, name)
        rows = read_rows(raw, where)
        # ids count from 0 in the order of the source, so they name the same problem wherever it came from
        tasks[split] = [make_task(row, place, f"gsm8k-{split}-{i:05d}") for i, (place, row) in enumerate(rows)]
        # rows from the last list, since a file may lack its last newline
        sources[name] = {"from": where} | describe(raw) | {"rows": len(rows)}
        if len(rows) != SPLITS[split]:
            print(f"note: {where} has {len(rows):,} rows, the released file {SPLITS[split]:,}", file=sys.stderr)

    lessons = [make_lesson(task) for task in tasks["train"]]
    held = len(lessons) // VALID_SHARE
    cut = len(lessons) - held
    files = {
        "train.jsonl": to_lines(tasks["train"]),
        "test.jsonl": to_lines(tasks["test"]),
        "sft.jsonl": to_lines(lessons[:cut]),
        "sft-valid.jsonl": to_lines(lessons[cut:]),
    }
    record = {"source": sources, "written": {name: describe(body) for name, body in files.items()}}
    # last, so that its hashes never describe files that are not there yet
    files["prepared.json"] = (json.dumps(record, indent=2) + "\n").encode()
    write_all(args.output_dir, files)
    if args.labbook:
        record_in(args.labbook, args.output_dir, record, time.time() - start)

    for kind, described in record.items():
        for name, row in described.items():
            print(f"{kind:<8}{name:<16}{row['rows']:>7,} rows {row['bytes']:>11,} bytes  sha256 {row['sha256']}")
    print(f"wrote GSM8K to {args.output_dir}")


if __name__ == "__main__":
    try:
        main()
    except Stop as stop:
        print(f"prepare.py: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except OSError as error:  # a full disk, a folder that cannot be read or written
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(1)
