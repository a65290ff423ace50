"""Solutions of a teacher, verified, as a textbook for train_sft.py: the alternative that RL has to beat.

    python data/distil/prepare.py --base-url http://127.0.0.1:8080/v1 --teacher-model qwen3-8b --budget-seconds 1800
    python data/distil/prepare.py --teacher-model data/tiny --output-dir data/distil/work   # of data/distil/serve.py

Each problem of --tasks goes to an OpenAI-compatible server with the very chat messages that the student gets, at most
--attempts times, until an answer is right: the number behind its last ####, as in every reward and evaluation here. An
answer that was cut at --max-tokens is wrong. Written to --output-dir:

    replies.jsonl   one line a request, raw, appended as they come; a second start asks for nothing that stands in it
    state.json      the settings that a second start must have too, and the seconds used so far
    train.jsonl     {"prompt", "completion"}, the verified answers; valid.jsonl: those of other problems
    prepared.json   hashes and counts of both

A kill at any moment loses the requests in flight. --budget-seconds is wall clock over all starts together; at its end
the requests in flight are dropped and counted. The API key comes from OPENAI_API_KEY or --api-key, is sent in a header
and stands in no file and no message. The client is urllib in threads: as many as --concurrency, so that is the bound on
requests in flight, and no package is needed for it.
Last line to expect: `wrote 54 + 6 rows of 60 problems to ...`.
"""
import fcntl
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (the path above comes first)
import envs  # noqa: E402
from common import RunError, UserError, number  # noqa: E402

KEY = "OPENAI_API_KEY"
AGAIN = (408, 409, 425, 429)   # and 5xx: the same request may well succeed later
IN_A_ROW = 5                   # requests given up, with no reply between them, after which the server is
LARGEST = 1 << 24              # bytes of a reply
IN_FLIGHT = "in flight at the end"
MAY_CHANGE = ("base_url", "budget_seconds", "timeout", "concurrency", "retries", "backoff")


class Parser(common.Parser):
    def error(self, message):
        """A mistyped flag's value may be the key: the flags are named, the values are not."""
        head, found, words = message.partition("unrecognized arguments: ")
        if found:
            message = head + found + " ".join(w.split("=")[0] for w in words.split() if w.startswith("-"))
        super().error(message)


def get_args(argv=None):
    p = Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--tasks", default=None, metavar="FILE", help="problems (default: the task's training file)")
    p.add_argument("--task", default="arithmetic", choices=sorted(envs.TASKS), help="how answers are read")
    p.add_argument("--base-url", default="http://127.0.0.1:8008/v1", help="the server, up to /chat/completions")
    p.add_argument("--teacher-model", default=None, metavar="NAME", help="the model's name on that server")
    p.add_argument("--api-key", default=None, help=f"better in the environment, {KEY}: others see a flag in `ps`")
    p.add_argument("--attempts", type=number(int, 1), default=1, help="answers to a problem at most; stops when right")
    p.add_argument("--temperature", type=number(float, 0), default=0.7, help="of the teacher's samples; top_p is 1")
    p.add_argument("--max-tokens", type=number(int, 1), default=512, help="tokens of an answer at most")
    p.add_argument("--extra", default="{}", metavar="JSON", help="more fields of each request, for one server's "
                   "needs: '{\"chat_template_kwargs\": {\"enable_thinking\": false}}'")
    p.add_argument("--budget-seconds", type=number(float, above=0), default=None,
                   help="wall clock over all starts, seconds (default: until every problem was asked)")
    p.add_argument("--timeout", type=number(float, above=0), default=300.0, help="seconds one request may take")
    p.add_argument("--concurrency", type=number(int, 1, 512), default=8, help="requests in flight at most")
    p.add_argument("--retries", type=number(int, 0), default=5, help="further tries of a request that failed")
    p.add_argument("--backoff", type=number(float, 0), default=1.0,
                   help="seconds before the first of them; doubles, up to 60, with jitter")
    p.add_argument("--keep-wrong", action="store_true", help="of an unsolved problem keep the last wrong answer")
    p.add_argument("--valid-fraction", type=number(float, 0, below=1), default=0.1,
                   help="share of the problems whose rows go to valid.jsonl")
    p.add_argument("--seed", type=number(int, 0, 2 ** 31 - 1), default=0, help="of the split and of the requests")
    p.add_argument("--output-dir", type=Path, default=Path(__file__).resolve().parent / "work", help="folder to write")
    p.add_argument("--labbook", default="labbook.md", help="file that gets a record of the budget and the hashes")
    p.add_argument("--notes", default="", help="free text for the record")
    args = p.parse_args(argv)
    if not args.teacher_model:
        p.error("--teacher-model NAME is needed, the name under which the server knows it")
    parts = urlsplit(args.base_url)
    if "@" in args.base_url or parts.query:   # an unquoted / in a password hides it from urlsplit
        p.error(f"--base-url holds a password or a query, and it is recorded: give the key in {KEY}")
    try:
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:   # .port may raise
            raise ValueError
    except ValueError:
        p.error(f"--base-url {args.base_url}: expected http://HOST:PORT/v1")
    try:
        if not isinstance(json.loads(args.extra), dict):
            raise ValueError("not a JSON object")
    except ValueError as e:
        p.error(f"--extra {args.extra}: {e}")
    for name in ("tasks", "labbook"):
        if getattr(args, name) == "":   # a shell variable that was not set, most likely
            p.error(f"--{name} is empty")
    return args


def read_key(args):
    key = (args.api_key if args.api_key is not None else os.environ.get(KEY, "")).strip()
    if not (key.isascii() and key.isprintable()):   # http.client would quote it in its complaint
        raise UserError(f"the API key (--api-key or {KEY}) holds a character that no header may hold")
    return key


# ----------------------------------------------------------------------------------------------------------------------
# One request

class Fault(Exception):
    """A request without a usable reply. again: it may be tried again; wait: the seconds that the server asked for."""

    def __init__(self, text, again=True, status=None, wait=0.0, dead=False, raw=None):
        super().__init__(text)
        self.again, self.status, self.wait, self.dead, self.raw = again, status, wait, dead, raw


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):   # urllib would carry the key to wherever the redirect points
        return None


timers = threading.local()   # .own: cuts this thread's request


def cut(sock):
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)   # also below TLS; whoever reads from it sees its end
    except OSError:
        pass   # it is closed


def bounded(kind):
    """A connection that is cut when its timeout is over: a socket's own never fires where a byte comes a second."""
    class Bounded(kind):
        def connect(self):
            super().connect()
            timers.own = threading.Timer(self.timeout, cut, [self.sock])
            timers.own.daemon = True
            timers.own.start()
    return Bounded


class Plain(urllib.request.HTTPHandler):
    def http_open(self, request):
        return self.do_open(bounded(http.client.HTTPConnection), request)


class Secure(urllib.request.HTTPSHandler):
    def https_open(self, request):
        return self.do_open(bounded(http.client.HTTPSConnection), request)


class Client:
    """POSTs to one server. Every text that comes back has the key cut out before anyone sees it."""

    def __init__(self, base_url, key, timeout):
        self.url, self.key, self.timeout = base_url.rstrip("/") + "/chat/completions", key, timeout
        loopback = urlsplit(base_url).hostname in ("localhost", "127.0.0.1", "::1")   # no proxy stands before those
        direct = [urllib.request.ProxyHandler({})] * loopback
        self.opener = urllib.request.build_opener(NoRedirect, Plain, Secure, *direct)

    def hide(self, text):
        if len(self.key) < 8:   # "EMPTY" and the like are no secret
            return text
        text = text.replace(self.key, "[key]").replace(self.key.replace("/", "\\/"), "[key]")
        try:   # JSON may spell it with escapes, \u0073k-...
            plain = json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            return text
        inside = json.dumps(self.key)[1:-1]
        return plain.replace(inside, "[key]") if inside in plain else text

    def post(self, payload):
        """-> the reply's body as text, or Fault."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(self.url, json.dumps(payload).encode(), headers, method="POST")
        deadline, timers.own = time.monotonic() + self.timeout, None
        try:
            with self.opener.open(request, timeout=self.timeout) as reply:
                body = b""
                while chunk := reply.read1(1 << 16):
                    body += chunk
                    if len(body) > LARGEST:
                        raise Fault(f"the reply is longer than {LARGEST:,} bytes")
                if time.monotonic() > deadline:   # the connection was cut, maybe within the headers
                    raise TimeoutError("timed out")
                expected = reply.headers.get("Content-Length")
                if expected is not None and expected.isdecimal() and len(body) < int(expected):
                    raise Fault(f"the reply broke off after {len(body):,} of {int(expected):,} bytes")
        except urllib.error.HTTPError as e:
            with e:
                try:
                    # that much more: a key at the end is whole, and found
                    detail = self.hide(e.read((1 << 16) + len(self.key)).decode(errors="replace"))[:1 << 16]
                except (OSError, http.client.HTTPException):
                    detail = ""
            again = e.code in AGAIN or e.code >= 500
            raise Fault(f"HTTP {e.code} {said(detail) or self.hide(str(e.reason))}", again, status=e.code,
                        wait=retry_after(e.headers.get("Retry-After")), raw=detail) from None
        except (OSError, http.client.HTTPException) as e:   # URLError, a reset and a timeout are OSErrors
            reason = getattr(e, "reason", e)
            if isinstance(reason, TimeoutError) or "timed out" in str(reason) or time.monotonic() > deadline:
                raise Fault(f"no reply within --timeout {self.timeout:g} s") from None
            broken = isinstance(reason, (ConnectionResetError, BrokenPipeError, http.client.HTTPException))
            text = self.hide(" ".join(str(reason).split())) or type(reason).__name__
            raise Fault(text, dead=not broken) from None
        finally:
            if timers.own is not None:
                timers.own.cancel()
        return self.hide(body.decode(errors="replace"))


def said(body):
    """The message in an error's body: {"error": {"message"}}, {"error"}, {"message"}, {"detail"}, or its beginning."""
    try:
        found = json.loads(body)
        for name in ("error", "message", "detail"):
            found = found.get(name, found) if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        found = body
    return " ".join(str(found).split())[:200]


def retry_after(text):
    """Seconds, or a date -> seconds from now, at most 600; 0 where there is none that can be read."""
    try:
        return max(0.0, min(float(text), 600.0))
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, min(parsedate_to_datetime(text).timestamp() - time.time(), 600.0))
    except (TypeError, ValueError):
        return 0.0


def depth(x):
    """How deep lists and dicts are nested."""
    level, count = [x], -1
    while level:
        level = [v for y in level if isinstance(y, (dict, list)) for v in (y.values() if isinstance(y, dict) else y)]
        count += 1
    return count


def read_reply(body):
    """A body -> {"text", "finish", "tokens_in", "tokens_out" (None without usage), "reply"}; Fault where it is none."""
    try:
        # half a surrogate pair is JSON but no text: it becomes a question mark
        reply = json.loads(json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as e:
        raise Fault(f"the reply is not JSON ({e}): {body[:60]!r}", raw=body) from None
    if depth(reply) > 100:   # what walks it later would not come back
        raise Fault(f"the reply is nested {depth(reply)} deep: {body[:60]!r}", raw=body)
    try:
        choice = reply["choices"][0]
        text = choice["message"].get("content") or ""
        thought = choice["message"].get("reasoning_content") or choice["message"].get("reasoning") or ""
        if not isinstance(text, str):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Fault(f"the reply has no choices[0].message.content: {said(body)!r}", raw=body) from None
    usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
    count = {k: usage.get(k) if isinstance(usage.get(k), int) else None for k in ("prompt_tokens", "completion_tokens")}
    return {"text": text.strip(), "finish": choice.get("finish_reason"), "tokens_in": count["prompt_tokens"],
            "tokens_out": count["completion_tokens"], "thought": bool(thought), "reply": reply}


# ----------------------------------------------------------------------------------------------------------------------
# What is kept: replies.jsonl and state.json

def check_line(line):
    """A line of replies.jsonl; ValueError for one that this script has not written."""
    if not isinstance(line, dict):
        raise ValueError("no JSON object")
    kinds = {"id": str, "at": (int, float)}
    if "text" in line:
        kinds |= {"text": str, "right": bool, "lenient": bool, "reply": dict, "tokens_in": (int, type(None)),
                  "tokens_out": (int, type(None)), "answer": (str, int, type(None)), "finish": object}
    else:
        kinds |= {"fault": str}
    for name, kind in kinds.items():
        if name not in line or not isinstance(line[name], kind):
            raise ValueError(f"its `{name}` is {str(line.get(name, 'missing'))[:60]!r}")


class Ledger:
    """The folder of one distillation. Two starts at once, and a start with other settings, are refused."""

    def __init__(self, folder, settings):
        self.folder, self.state = folder, folder / "state.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            seen = sorted(p.name for p in folder.iterdir() if (p.suffix == ".jsonl" or p.name == "prepared.json")
                          and p.stat().st_size)   # an empty one was left by a kill at the very start
        except OSError as e:
            raise UserError(f"--output-dir {folder}: cannot be made ({e.strerror})") from e
        self.wall_s, self.recorded = 0.0, None
        if self.state.exists():
            try:
                old = json.loads(self.state.read_text(encoding="utf-8"))
                for name, value in settings.items():
                    if old["settings"].get(name) != value:
                        raise UserError(f"--{name.replace('_', '-')} {value} differs from {old['settings'].get(name)} "
                                        f"in {folder}, which goes on only as it began (may change: "
                                        f"{', '.join('--' + x.replace('_', '-') for x in MAY_CHANGE)}); take another "
                                        f"--output-dir")
                self.wall_s, self.recorded = old["wall_s"], old["recorded"]
                if type(self.wall_s) not in (int, float) or not 0 <= self.wall_s < 1e12:
                    raise ValueError
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
                raise UserError(f"{self.state}: not what this script writes ({type(e).__name__}); take another "
                                f"--output-dir") from e
        elif seen:
            raise UserError(f"--output-dir {folder} holds {', '.join(seen[:3])} of something else; take another folder")
        self.settings = settings
        self.file = open(folder / "replies.jsonl", "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output-dir {folder} is in use by another start of this script") from None
        self.file.seek(0)
        text = self.file.read()
        whole = text[:text.rfind(b"\n") + 1]   # a kill while the line was written leaves a torn one: it was never kept
        self.lines = []
        for i, line in enumerate(whole.split(b"\n"), 1):
            try:
                if line:
                    self.lines.append(json.loads(line))
                    check_line(self.lines[-1])
            except (ValueError, RecursionError) as e:
                raise UserError(f"{folder / 'replies.jsonl'}:{i}: not what this script writes ({e}); take the line out "
                                f"or take another --output-dir") from e
        self.file.truncate(len(whole))
        self.wall_s = max([self.wall_s] + [line["at"] for line in self.lines])
        self.save(self.wall_s)

    def append(self, line):
        self.file.write(json.dumps(common.finite(line), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.lines.append(line)

    def save(self, wall_s):
        self.wall_s = wall_s
        common.write_json(self.state, {"settings": self.settings, "wall_s": wall_s, "recorded": self.recorded})

    def replies(self):
        """-> {problem's id: its replies in order}"""
        found = {}
        for line in self.lines:
            if "text" in line:
                found.setdefault(line["id"], []).append(line)
        return found


# ----------------------------------------------------------------------------------------------------------------------
# Asking: --concurrency threads take problems from one queue

class Asker:
    def __init__(self, args, task, rows, ledger, client):
        self.args, self.task, self.ledger, self.client = args, task, ledger, client
        self.extra = json.loads(args.extra)
        self.lock, self.halt = threading.Lock(), threading.Event()
        self.end = None            # why asking stopped: "budget", "SIGINT", "SIGTERM" or the exception of a thread
        self.flying = {}           # thread -> the request that it waits for
        self.pause, self.dry = 0.0, 0   # nobody asks before; requests given up since the last reply
        self.t0, self.before = time.monotonic(), ledger.wall_s
        kept = ledger.replies()
        self.jobs = deque((row, len(kept.get(row["id"], ()))) for row in rows
                          if len(kept.get(row["id"], ())) < args.attempts
                          and not any(r["right"] for r in kept.get(row["id"], ())))

    def wall_s(self):
        return self.before + time.monotonic() - self.t0

    def run(self):
        """Returns when every problem was asked, the budget is spent, a signal came, or the server is given up."""
        budget, told, saved = self.args.budget_seconds, time.monotonic(), 0.0
        if budget is not None and self.wall_s() >= budget:
            self.stop("budget")   # spent by the starts before
        signals = {s: signal.signal(s, self.on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        threads = [threading.Thread(target=self.work, daemon=True)   # daemon: the end does not wait for a silent server
                   for _ in range(min(self.args.concurrency, len(self.jobs)) if self.end is None else 0)]
        for t in threads:
            t.start()
        while self.end is None and any(t.is_alive() for t in threads):
            left = 0.2 if budget is None else min(0.2, budget - self.wall_s())
            if left <= 0:
                self.stop("budget")
            else:
                self.halt.wait(left)
            if time.monotonic() - saved > 2:   # a kill then costs two seconds of the budget's count
                self.ledger.save(self.wall_s())
                saved = time.monotonic()
            if time.monotonic() - told > 5:
                print(f"{self.wall_s():6.0f} s  {self.progress()}", flush=True)
                told = time.monotonic()
        self.stop(None)
        with self.lock:   # from here on no thread writes; what is in flight is lost, and counted
            for name, attempt in self.flying.values():
                self.ledger.append({"id": name, "attempt": attempt, "fault": IN_FLIGHT, "at": self.wall_s()})
            self.flying = None
        self.ledger.save(self.wall_s())
        for s, before in signals.items():
            signal.signal(s, before)
        if isinstance(self.end, BaseException) and not isinstance(self.end, Fault):
            raise self.end

    def stop(self, why):
        if self.end is None:
            self.end = why
        self.halt.set()

    def on_signal(self, signum, frame):
        if self.end is not None:   # the second one means now
            raise KeyboardInterrupt
        self.stop(signal.Signals(signum).name)

    def progress(self):
        with self.lock:
            right = sum(bool(line.get("right")) for line in self.ledger.lines)
            return (f"{len({line['id'] for line in self.ledger.lines})} problems  {len(self.ledger.lines)} requests  "
                    f"{right} right")

    def work(self):
        try:
            while not self.halt.is_set():
                try:
                    row, first = self.jobs.popleft()
                except IndexError:
                    return
                for attempt in range(first, self.args.attempts):
                    reply = self.request(row, attempt)
                    if reply is None or reply["right"]:
                        break
        except BaseException as e:   # a full disk, a bug: the main thread raises it
            self.stop(e)

    def request(self, row, attempt):
        """One answer, with retries -> its line, or None where it was given up."""
        a = self.args
        payload = {"model": a.teacher_model, "messages": row["prompt"], "temperature": a.temperature, "top_p": 1,
                   "max_tokens": a.max_tokens, "seed": (a.seed * a.attempts + attempt) % 2 ** 31, **self.extra}
        me = threading.get_ident()
        for tries in range(1, a.retries + 2):
            while time.monotonic() < self.pause and not self.halt.is_set():
                self.halt.wait(self.pause - time.monotonic())
            with self.lock:
                if self.halt.is_set() or self.flying is None:
                    return None
                self.flying[me] = (row["id"], attempt)
            began = time.monotonic()
            try:
                line = read_reply(self.client.post(payload))
                fault = None
            except Fault as e:
                line, fault = {"fault": str(e), "status": e.status, "raw": e.raw}, e
            line = {"id": row["id"], "attempt": attempt, **line, "s": round(time.monotonic() - began, 3)}
            with self.lock:
                if self.flying is None:
                    return None
                if fault is None:
                    grade = self.task.grade(line["text"], row)
                    cut = line["finish"] == "length"
                    line |= {"right": bool(grade["right"]) and not cut, "lenient": bool(grade["lenient"]) and not cut,
                             "answer": grade["answer"]}
                    self.dry = 0
                line["at"] = round(self.wall_s(), 3)
                self.ledger.append(line)
                del self.flying[me]
            if fault is None:
                return line
            if not fault.again or tries > a.retries:
                break
            wait = min(a.backoff * 2 ** (tries - 1), 60.0) * (0.5 + random.random())
            if fault.wait:   # the server's word counts for every thread
                wait = max(wait, fault.wait)
                self.pause = max(self.pause, time.monotonic() + fault.wait)
            print(f"{row['id']}: {fault}; again in {wait:.1f} s", flush=True)
            self.halt.wait(wait)
        with self.lock:
            self.dry += 1
            if fault.status in (300, 301, 302, 303, 307, 308, 401, 403, 404, 405) or fault.dead or self.dry >= IN_A_ROW:
                self.stop(fault)
        return None


# ----------------------------------------------------------------------------------------------------------------------
# What comes of it

def choose(rows, replies, keep_wrong):
    """-> [(row, reply)] in the order of the problems: the right answer, or with keep_wrong the last whole wrong one."""
    pairs = []
    for row in rows:
        own = replies.get(row["id"], [])
        good = [r for r in own if r["right"]]
        if keep_wrong and not good:   # a cut answer would be taught as a whole one
            good = [r for r in own if r["text"] and r["finish"] != "length"]
        if good:
            pairs.append((row, good[-1]))
    return pairs


def split(pairs, fraction, seed):
    """-> (train, valid): textbook rows. The problems with the smallest hashes of (seed, id) are the valid ones."""
    def draw(pair):
        return hashlib.sha256(f"{seed}:{pair[0]['id']}".encode()).hexdigest()
    count = max(1, int(len(pairs) * fraction)) if fraction and len(pairs) > 1 else 0
    held = {row["id"] for row, _ in sorted(pairs, key=draw)[:count]}
    book = [(row["id"], {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": reply["text"]}]})
            for row, reply in pairs]
    return [r for i, r in book if i not in held], [r for i, r in book if i in held]


#        cause            what to do
CAUSES = {"not asked": "raise --budget-seconds and start again: it goes on from here",
          "server errors": "the server's own log says more; start again: it asks for these anew",
          "truncated": "raise --max-tokens, or turn a thinking teacher's thinking off with --extra",
          "empty": "the teacher said nothing, or all its tokens went into thinking: see replies.jsonl and --extra",
          "no marked answer": "the prompt must ask for `#### N`, and the teacher must follow it",
          "wrong number": "more --attempts give further tries, a larger teacher better ones"}


def count_causes(rows, ledger):
    """Why the other problems have no right answer -> Counter over CAUSES, one a problem, by its last reply."""
    replies, causes = ledger.replies(), Counter()
    failed = {x["id"] for x in ledger.lines if "fault" in x and x["fault"] != IN_FLIGHT}
    for row in rows:
        own = replies.get(row["id"], [])
        if any(r["right"] for r in own):
            continue
        causes["server errors" if not own and row["id"] in failed else "not asked" if not own else
               "truncated" if own[-1]["finish"] == "length" else "empty" if not own[-1]["text"] else
               "no marked answer" if own[-1]["answer"] is None else "wrong number"] += 1
    return causes


def show_answers(rows, replies):
    """Two right answers and two wrong ones, or what there is of them."""
    wrong, right = [[(row, r) for row in rows for r in replies.get(row["id"], []) if r["right"] == b]
                    for b in (False, True)]
    take = max(2, 4 - len(wrong)), max(2, 4 - len(right))
    for name, (row, r) in [("right", x) for x in right[:take[0]]] + [("wrong", x) for x in wrong[:take[1]]]:
        text = r["text"] if len(r["text"]) <= 600 else r["text"][:300] + " [...] " + r["text"][-300:]
        print(f"\n{name}: {row['id']} wants {row['answer']}, read {r['answer']}, finish {r['finish']}")
        print("\n".join("  | " + line for line in (text or "(empty)").split("\n")))
    print()


def blame(fault, asker, kept):
    """The fault that ended the asking -> UserError or RunError with one sentence."""
    a = asker.args
    rest = f"; {kept} replies are kept in {asker.ledger.folder / 'replies.jsonl'}"
    if kept and fault.status != 404:
        rest += ", the same command goes on from them"
    if fault.status in (401, 403):
        return UserError(f"{a.base_url} refuses the key ({fault}): set {KEY} or --api-key{rest}")
    if fault.status in (404, 405):
        return UserError(f"{asker.client.url} knows no model {a.teacher_model}, or is no such address ({fault}): "
                         f"--teacher-model takes a name that {a.base_url.rstrip('/')}/models lists, and --base-url "
                         f"usually ends in /v1{rest}")
    if fault.status is not None and fault.status < 400:
        return UserError(f"{asker.client.url} redirects ({fault}), and the key goes to no other place: give the final "
                         f"address as --base-url{rest}")
    if fault.dead:
        return RunError(f"no server at {a.base_url} ({fault}, {a.retries + 1} tries): start it, or mend "
                        f"--base-url{rest}")
    kind = UserError if fault.status is not None and not fault.again else RunError
    return kind(f"{a.base_url} failed {asker.dry} requests in a row, the last with: {fault}{rest}")


def last_fault(ledger):
    faults = [line["fault"] for line in ledger.lines if line.get("fault")]
    return f", the last fault: {faults[-1]}" if faults else ""


def write_books(args, rows, ledger):
    """train.jsonl and valid.jsonl of what is kept -> [{"path", "rows", "sha256"}], empty where there is no row."""
    train, valid = split(choose(rows, ledger.replies(), args.keep_wrong), args.valid_fraction, args.seed)
    written = []
    for name, book in [("train.jsonl", train), ("valid.jsonl", valid)] if train else []:
        path = args.output_dir / name
        common.write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in book))
        written.append({"path": common.short_path(path), "rows": len(book), "sha256": common.sha256_file(path)})
    return written


def add_up(rows, ledger, written, end):
    """-> (budget, scores) of the record: what was spent, and what came of it."""
    answers = [x for x in ledger.lines if "text" in x]
    usage = [r for r in answers if r["tokens_out"] is not None]
    tokens_in, tokens_out = (sum(r[k] or 0 for r in usage) if usage else None for k in ("tokens_in", "tokens_out"))
    asked, causes = len({x["id"] for x in ledger.lines}), count_causes(rows, ledger)
    budget = {"prompts": asked, "rollouts": len(answers), "requests": len(ledger.lines), "tokens_in": tokens_in,
              "tokens_out": tokens_out, "tokens_sampled": tokens_out, "tokens_trained": 0,
              "wall_s": round(ledger.wall_s, 1)}
    scores = {"problems": len(rows), "asked": asked, "requests": len(ledger.lines), "replies": len(answers),
              "right": sum(r["right"] for r in answers), "rows": sum(w["rows"] for w in written),
              "lenient_only": sum(r["lenient"] and not r["right"] for r in answers),
              "causes": {k: causes[k] for k in CAUSES}, "ended": "all asked" if end is None else str(end),
              "faults": dict(Counter(x["fault"][:80] for x in ledger.lines if "fault" in x).most_common(9)),
              "without_usage": len(answers) - len(usage),
              "served_as": sorted({str(r["reply"].get("model")) for r in answers})}
    return budget, scores


def explain(scores):
    """Why there are not more right answers: each cause with its count, and what to do about the first."""
    causes = Counter({k: n for k, n in scores["causes"].items() if n}).most_common()
    # a teacher that solves nothing is not helped by more time
    first = next((k for k, _ in causes if scores["right"] or k != "not asked"), causes[0][0])
    bare = (f"; {scores['lenient_only']} answers would be right by their last number, without the mark"
            if scores["lenient_only"] else "")
    return f"{', '.join(f'{n} {cause}' for cause, n in causes)}{bare}; {first}: {CAUSES[first]}"


def say(args, rows, ledger, budget, scores, written):
    if scores["replies"]:
        show_answers(rows, ledger.replies())
    print(f"problems {scores['asked']} of {scores['problems']}; requests {scores['requests']}; right answers "
          f"{scores['right']}; tokens in {budget['tokens_in']}, out {budget['tokens_out']}; {budget['wall_s']} s of "
          f"{'no budget' if args.budget_seconds is None else f'{args.budget_seconds:g}'}")
    if scores["without_usage"]:
        print(f"{scores['without_usage']} of {scores['replies']} replies have no `usage`: their tokens are not counted")
    if scores["ended"] == "budget":
        print(f"the budget of {args.budget_seconds:g} s ran out")
    missing = sum(scores["causes"].values())
    if missing:
        print(f"without a right answer: {missing} of {scores['problems']} problems: {explain(scores)}")
    for w in written:
        print(f"{w['rows']:>6} rows  sha256 {w['sha256']}  {w['path']}")


def main(argv=None):
    args = get_args(argv)
    key = read_key(args)
    path = Path(args.tasks) if args.tasks else envs.get_task(args.task).path(envs.TASKS[args.task].train)
    task = envs.TASKS[args.task](path.parent)
    rows = envs.load_rows(path, task)
    if all((path.parent / f"{s}.jsonl").exists() for s in task.splits):
        envs.check_apart(rows, path, task)   # what is evaluated must not be trained on
    common.check_writable(args.labbook)
    client = Client(args.base_url, key, args.timeout)
    for name in ("base_url", "teacher_model", "extra", "tasks", "output_dir", "labbook", "notes"):
        if client.hide(str(getattr(args, name))) != str(getattr(args, name)):
            raise UserError(f"--{name.replace('_', '-')} holds the API key, and it is recorded: leave it to {KEY}, "
                            f"which is sent and not written")
    source = {"path": common.short_path(path), "sha256": common.sha256_file(path), "rows": len(rows)}
    settings = {"tasks": source["sha256"], **{k: getattr(args, k) for k in (
        "task", "teacher_model", "attempts", "temperature", "max_tokens", "extra", "keep_wrong", "valid_fraction",
        "seed")}}
    ledger = Ledger(args.output_dir, settings)
    asker = Asker(args, task, rows, ledger, client)
    print(f"{len(rows)} problems of {path}; teacher {args.teacher_model} at {args.base_url}; at most "
          f"{args.concurrency} requests in flight; {len(ledger.lines)} requests and {ledger.wall_s:.0f} s stand in "
          f"{args.output_dir}")
    mute = sum("####" not in row["prompt"][-1]["content"] for row in rows)
    if mute:
        print(f"note: {mute} of {len(rows)} prompts do not mention ####, by which an answer is read")
    if not asker.jobs:
        print("nothing is left to ask")
    asker.run()

    # what is kept goes to disk first, whatever happened; then it is said, and recorded
    written = write_books(args, rows, ledger)
    budget, scores = add_up(rows, ledger, written, asker.end)
    if written:
        common.write_json(args.output_dir / "prepared.json", {"source": source, "written": written, "budget": budget,
                                                              "scores": scores})
    say(args, rows, ledger, budget, scores, written)
    fault = asker.end if isinstance(asker.end, Fault) else None
    stopped = asker.end if asker.end in ("SIGINT", "SIGTERM") else None
    status = "stopped" if stopped else "failed" if fault or not written else "ok"
    mark = hashlib.sha256(json.dumps([scores, written, status]).encode()).hexdigest()
    if scores["replies"] and mark != ledger.recorded:   # a start with nothing left to do adds no record
        record = {"kind": "data", "run_id": f"distil-{time.strftime('%y%m%d-%H%M%S')}", "parent": None,
                  "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "script": "data/distil/prepare", "arm": None,
                  "task": args.task, "model": {"name": args.teacher_model, "sha256": None},
                  "data": written,   # not the problems: report.py finds by these hashes what a run's data has cost
                  "seed": args.seed, "config": {**settings, "source": source, **{k: getattr(args, k) for k in
                                                                                MAY_CHANGE}},
                  "budget": budget, "losses": {}, "scores": scores, "status": status, "git": common.git_state(),
                  "versions": common.versions(), "device": None, "notes": args.notes}
        common.append_record(args.labbook, record, f"- {time.strftime('%Y-%m-%d %H:%M')} {status} distillation from "
                             f"{args.teacher_model}: {sum(w['rows'] for w in written)} rows of {len(rows)} problems")
        ledger.recorded = mark
        ledger.save(ledger.wall_s)
    if fault:
        raise blame(fault, asker, scores["replies"])
    if not written and not stopped:
        if not scores["replies"]:
            raise RunError(f"the budget of {args.budget_seconds:g} s ran out before the first answer came "
                           f"({len(ledger.lines)} requests{last_fault(ledger)})" if asker.end == "budget" else
                           f"none of {len(ledger.lines)} requests was answered, the last with: "
                           f"{ledger.lines[-1]['fault']}")
        raise RunError(f"the teacher {args.teacher_model} solved none of the {len(ledger.replies())} problems "
                       f"that it answered, in the form that is asked for: {explain(scores)}; all "
                       f"{scores['replies']} replies are in {args.output_dir / 'replies.jsonl'}")
    print(f"{stopped + ', all saved: ' if stopped else ''}wrote {' + '.join(str(w['rows']) for w in written) or 'no'} "
          f"rows of {len(rows)} problems to {args.output_dir}")
    sys.exit({None: 0, "SIGINT": 130, "SIGTERM": 143}[stopped])


if __name__ == "__main__":
    common.fail_in_one_line()
    main()
