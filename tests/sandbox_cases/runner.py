"""Runs the attack files of this folder, and its honest programs, against sandbox.py; prints one JSON line for each.

No pytest in here: test_sandbox_cases.py starts it in a process of its own, as root and as an ordinary user,
in each tier.

An attack file begins with comment lines `# key: value`:
    goal    what it tries, one line
    kind    function (judged by ([args], expected) pairs), unittest (by a module), or both (the default)
    tests   a row of make_tests() below (default: add)
    expect  statuses that count as held, joined by |
    limits  fields of sandbox.Limits for this case, as in `wall_s=1 cpu_s=1` (optional)
    plain   yes: judged with plain=True, which refuses returned objects (optional, unittest only)
    runs    how often it is judged in a row (default 1): a second run must not find what the first one left
In its text @DIR@ is a folder of the host that all may write, @CANARY@ and @VICTIM@ files in it that all may read and
that all may write, @MARK@ a name unique to this runner, @TCP@ and @UDP@ ports that listen on the loopback, @UNIX@ and
@ABSTRACT@ sockets that listen, @RUNNER@ this file and @PID@ this process.

A case is held when it never passes, its status is expected, no canary shows (host file, expected value, connection,
changed file), the next honest program in the same pool is judged right, and no process outlives it.

A file in honest/ or wrong/ begins with lines `# test: [args] -> value` and one `# expect: status`; its entry is f.
"""

import argparse
import ctypes
import json
import math
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATUSES = {"pass", "fail", "error", "timeout", "memory", "output", "protocol"}

# words of the published examples' headers, as statuses
EXAMPLE_STATUS = {
    "fail_verdict": "fail|error|protocol",
    "blocked_write": "fail|error",
    "blocked_network": "fail|error",
    "killed_memory": "memory|error|fail",
    "output_capped": "output|fail",
    "timeout": "timeout",
    "no_orphan": "fail|error",
}

SECRET = "expected-" + secrets.token_hex(12)  # only ever in a test's expected value
SECRET_NUMBER = secrets.randbelow(10**12) + 0.5  # likewise
CANARY = "canary-" + secrets.token_hex(12)  # only ever in a file and in the environment of the host


# ---------------------------------------------------------------------------------------------------------------------
# the tests that attacks face

# name: (name imported from the candidate, methods of one TestCase). SECRET and SECRET_NUMBER are filled in as literals.
UNIT = {
    "add": ("add", """
def test_0(self):
    self.assertEqual(add(1, 2), 3)
def test_1(self):
    self.assertEqual(add(10, -4), 6)
def test_2(self):
    self.assertEqual(add(123, 877), 1000)
"""),
    "secret": ("secret", """
def test_secret(self):
    self.assertEqual(secret(1), SECRET)
"""),
    "canary": ("read", """
def test_canary(self):
    self.assertEqual(read(), CANARY)
"""),
    "half": ("half", """
def test_places(self):
    self.assertAlmostEqual(half(3.0), 1.5)
def test_delta(self):
    self.assertAlmostEqual(half(5.0), 2.5, delta=1e-6)
"""),
    "near": ("half", """
def test_near(self):
    self.assertAlmostEqual(half(3.0), SECRET_NUMBER)
"""),
    "square": ("half", """
def test_square(self):
    self.assertTrue((half(3.0) - 1.5) ** 2 < 1e-9)
def test_root(self):
    self.assertLess(((half(5.0) - 2.5) ** 2) ** 0.5, 1e-6)
"""),
    "text": ("half", """
def test_format(self):
    self.assertEqual(f"{half(3.0) - 1.5:.3f}", "0.000")
def test_str(self):
    self.assertEqual(str(half(5.0) - 2.5), "0.0")
"""),
    "gap": ("day", """
def test_attribute(self):
    self.assertEqual((day(5) - datetime.date(2020, 1, 5)).days, 0)
def test_method(self):
    self.assertEqual(f"{(day(5) - datetime.date(2020, 1, 5)).total_seconds():.1f}", "0.0")
"""),
    "mapped": ("half", """
def test_all(self):
    self.assertTrue(all(map(half, [2.0, 4.0])))
def test_pairs(self):
    for got, want in zip(map(half, [3.0, 5.0]), [1.5, 2.5]):
        self.assertEqual(got, want)
"""),
    "order": ("low", """
def test_less(self):
    self.assertLess(low(5), 5)
    self.assertGreater(low(5), 3)
def test_between(self):
    self.assertTrue(3 < low(5) < 5)
    self.assertLessEqual(abs(low(5) - 4), 0)
"""),
    "member": ("evens", """
def test_in(self):
    self.assertIn(4, evens(9))
    self.assertIn(8, evens(9))
    self.assertNotIn(3, evens(9))
"""),
    "star": ("*", """
def test_sorted(self):
    self.assertEqual(sorted(evens(9)), sorted([8, 2, 6, 4]))
def test_length(self):
    self.assertEqual(len(evens(5)), len([2, 4]))
"""),
    "raises": ("root", """
def test_value(self):
    self.assertEqual(root(4), 2)
def test_raises(self):
    with self.assertRaises(ValueError) as caught:
        root(-1)
    self.assertEqual(str(caught.exception), "negative")
"""),
    "refuse": ("root", """
def test_negative(self):
    with self.assertRaises(Exception):
        root(-1)
def test_text(self):
    with self.assertRaises(Exception):
        root("x")
"""),
    "typed": ("root", """
def test_text(self):
    with self.assertRaises(TypeError):
        root("x")
def test_list(self):
    with self.assertRaises((TypeError, ValueError)):
        root([])
"""),
    "each": ("each", """
def test_each(self):
    seen = []
    hidden = SECRET
    def visit(item):
        seen.append(item)
        return len(seen)
    self.assertEqual(each([5, 6], visit), hidden[:0] + hidden)
    self.assertEqual(seen, [5, 6])
"""),
    "visit": ("each", """
def test_visit(self):
    each([5, 6], lambda item: self.assertEqual(item, SECRET))
"""),
    "gather": ("each", """
def test_gather(self):
    near = []
    each([5.0, 6.0], lambda item: near.append(abs(item - 5.5) < 1))
    self.assertTrue(all(near))
"""),
    "context": ("Box", """
def test_value(self):
    with Box(3) as box:
        self.assertEqual(box.value(), 9)
def test_text(self):
    with Box(4) as box:
        self.assertEqual(box.text(), SECRET)
"""),
    "stack": ("Stack", """
def test_push(self):
    s = Stack()
    s.push(1)
    s.push(2)
    self.assertEqual(s.pop(), 2)
    self.assertEqual(len(s), 1)
def test_items(self):
    s = Stack()
    s.push(7)
    self.assertEqual(s.items, [7])
    self.assertEqual(list(s), [7])
"""),
    "nest": ("nest", """
def test_nest(self):
    self.assertEqual(nest(2), [[[]]])
"""),
}


def make_tests(sandbox):
    """name -> (entry, function tests or None, source of a unittest module, number of tests in it)."""
    pairs = {
        "add": [([1, 2], 3), ([10, -4], 6), ([123, 877], 1000)],
        "secret": [([1], SECRET)],
        "canary": [([], CANARY)],
        "half": [([3.0], sandbox.Approx(1.5, 1e-6)), ([5.0], sandbox.Approx(2.5, 1e-6))],
        "raises": [([4], 2), ([-1], sandbox.Raises("ValueError", "negative"))],
        "nest": [([2], [[[]]]), ([1], [[]])],
    }
    rows = {}
    for name, (entry, methods) in UNIT.items():
        methods = methods.replace("SECRET_NUMBER", repr(SECRET_NUMBER)).replace("SECRET", repr(SECRET))
        lines = ["import datetime", "import unittest", f"from solution import {entry}"]
        lines += ["class HiddenTest(unittest.TestCase):"]
        lines += ["    " + line for line in methods.replace("CANARY", repr(CANARY)).strip().splitlines()]
        rows[name] = (entry, pairs.get(name), "\n".join(lines) + "\n", methods.count("def test_"))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# the host: what must stay as it is


class Host:
    """Canary files and listening sockets; `breaches()` says what was touched since the last call."""

    def __init__(self):
        self.mark = "nanopost-" + secrets.token_hex(6)
        self.dir = Path(tempfile.mkdtemp(prefix="sandbox-host-"))
        os.chmod(self.dir, 0o777)
        self.canary = self.dir / "canary.txt"
        self.canary.write_text(CANARY)
        self.victim = self.dir / "victim.txt"  # every attack may try to change it
        self.victim.write_text("untouched")
        os.chmod(self.victim, 0o666)
        self.hits = []
        self.tcp = self.listen(socket.AF_INET, ("127.0.0.1", 0))
        self.fixed = self.listen(socket.AF_INET, ("127.0.0.1", 47613))  # the port of the published examples
        self.unix = self.listen(socket.AF_UNIX, str(self.dir / "sock"))
        self.abstract = self.listen(socket.AF_UNIX, "\0" + self.mark)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.marker = Path("/tmp/sbx-marker")  # the folder of the published examples
        if not self.marker.is_dir():
            self.marker.mkdir()
            self.marker.chmod(0o777)
        self.before = self.snapshot()

    def listen(self, family, address):
        """A stream server that answers everyone; None when another runner holds the address."""
        server = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
        except OSError:
            server.close()
            return None
        server.listen(16)
        threading.Thread(target=self.serve, args=(server,), daemon=True).start()
        return server

    def serve(self, server):
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return  # closed: the run is over
            self.hits.append(f"connection to {server.getsockname()}")
            with peer:
                peer.settimeout(1)
                try:
                    peer.recv(4096)
                    peer.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\ntoken")
                except OSError:
                    pass  # the hit is what counts

    def fill(self, text):
        """The case's text with the addresses of this host in it."""
        values = {
            "DIR": self.dir, "CANARY": self.canary, "VICTIM": self.victim, "MARK": self.mark, "UNIX": self.dir / "sock",
            "TCP": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1], "ABSTRACT": self.mark,
            "RUNNER": HERE / "runner.py", "PID": os.getpid(),
        }
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        return text

    def snapshot(self):
        """path -> what an attack could change about it."""
        seen = {}
        for path in [self.dir, *sorted(self.dir.rglob("*"))]:
            info = path.lstat()
            attributes = () if stat.S_ISSOCK(info.st_mode) else tuple(os.listxattr(path, follow_symlinks=False))
            text = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
            seen[str(path)] = (info.st_mode, info.st_uid, info.st_mtime_ns, info.st_nlink, attributes, text)
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", os.path.dirname(os.__file__)):
            if os.path.isdir(folder):
                seen.update({f"{folder}/{name}": "left" for name in os.listdir(folder) if self.mark in name})
        seen.update({str(path): "left" for path in self.marker.glob("example_*")})
        return seen

    def breaches(self):
        found, self.hits = list(self.hits), []
        after = self.snapshot()
        paths = sorted(set(after) | set(self.before))
        found += [f"changed: {path}" for path in paths if after.get(path) != self.before.get(path)]
        self.before = after  # name each breach once, at the case that made it
        try:
            self.udp.recv(100)
            found.append("udp packet")
        except BlockingIOError:
            pass
        return found

    def close(self):
        for server in (self.tcp, self.fixed, self.unix, self.abstract, self.udp):
            if server is not None:
                server.close()
        shutil.rmtree(self.dir)
        if self.marker.is_dir() and not any(self.marker.iterdir()) and self.marker.stat().st_uid == os.getuid():
            self.marker.rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# processes


def descendants(root):
    """pids of all processes below `root`. The runner is a subreaper, so what loses its parent still ends up here."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found, queue = set(), [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def become_subreaper():
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def settle(wanted, seconds=2.0):
    """Waits until no more processes are left than `wanted` has; returns those of now."""
    end = time.monotonic() + seconds
    while True:
        now = descendants(os.getpid())
        if len(now) <= len(wanted) or time.monotonic() > end:
            return now
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------------
# attacks


def read_case(path):
    """Header fields of one attack file, with its text under `code`."""
    case = {"name": path.stem, "kind": "both", "tests": "add", "limits": "", "runs": "1", "plain": "no"}
    case["code"] = path.read_text()
    for line in case["code"].splitlines():
        if not line.startswith("# "):
            break
        key, _, value = line[2:].partition(":")
        case[key.strip()] = value.strip()
    case["expect"] = EXAMPLE_STATUS.get(case["expect"], case["expect"])
    words = set(case["expect"].split("|"))
    if not words <= STATUSES - {"pass"} or case["kind"] not in ("function", "unittest", "both") or "goal" not in case:
        raise ValueError(f"{path}: bad header (expect {case['expect']!r}, kind {case['kind']!r})")
    return case


def all_cases(examples):
    """Every attack of this folder, and the published ones where their folder exists."""
    cases = [read_case(path) for path in sorted(HERE.glob("*_*.py"))]
    if examples.is_dir():
        for path in sorted(examples.glob("*.py")):
            case = read_case(path)
            cases.append(dict(case, name="example_" + case["name"], limits="wall_s=3 cpu_s=2"))
    return cases


def kinds_of(case):
    return ("function", "unittest") if case["kind"] == "both" else (case["kind"],)


def quick_kinds(case, tier):
    """The share of one tier in the default run: what can be judged both ways is judged one way in each tier."""
    kinds = kinds_of(case)
    return kinds if len(kinds) == 1 else kinds[:1] if tier == "ns" else kinds[1:]


def is_quick(case):
    """Whether the case belongs to the default run: of those that wait for a limit two do."""
    if case["name"].startswith("example_"):
        return not case["name"].startswith("example_exhaust")
    return not case["limits"] or case["name"] in ("exhaust_sleep", "exhaust_memory_string")


HONEST_ADD = "def add(a, b):\n    return a + b\n"


def job_of(code, kind, row, limits):
    """The keywords of Sandbox.judge for one program and one row of make_tests()."""
    entry, pairs, unit, count = row
    if kind == "function":
        return dict(code=code, tests=pairs, entry=entry, limits=limits)
    return dict(code=code, tests=unit, module="solution", expect_tests=count, limits=limits)


def limits_of(case, kind, sandbox):
    """The case's sandbox.Limits: the defaults of its kind with the header's changes."""
    start = sandbox.Limits.modules() if kind == "unittest" else sandbox.Limits()
    fields = dict(pair.split("=") for pair in case["limits"].split())
    changes = {key: float(value) if key.endswith("_s") else int(value) for key, value in fields.items()}
    return sandbox.Limits(**{**start.__dict__, **changes})


def faults(result, case, limits, tier, seconds):
    """Reasons why one result does not count as held."""
    shown = result.message + result.output
    checks = (
        (result.passed or result.status == "pass", "passed"),
        (result.status not in case["expect"].split("|"),
         f"status {result.status}, expected {case['expect']}: {result.message[:200]}"),
        (SECRET in shown or str(SECRET_NUMBER) in shown, "the expected value shows"),
        (CANARY in shown, "the host's file shows"),
        (len(result.message) > 500, f"message of {len(result.message)} characters"),
        (len(result.output) > 1024 * (limits.output_kb + 1), f"output of {len(result.output)} characters"),
        (bool(result.per_test) and all(result.per_test), "per_test says that all passed"),
        (result.tier != tier, f"tier {result.tier!r}"),
        # a starved program has twice its wall limit, and is tried again
        (seconds > 4 * limits.wall_s + 8, f"took {seconds:.1f} s"),
    )
    return [reason for bad, reason in checks if bad]


def attack(box, sandbox, case, kind, tests, host, base):
    """Judges one attack file, then an honest program; returns the case's record with `held` and `why`."""
    limits, why = limits_of(case, kind, sandbox), []
    for _ in range(int(case["runs"])):
        begin = time.monotonic()
        job = job_of(host.fill(case["code"]), kind, tests[case["tests"]], limits)
        result = box.judge(**job, plain=case["plain"] == "yes")
        seconds = time.monotonic() - begin
        why += faults(result, case, limits, box.tier, seconds)
    why += host.breaches()
    now = settle(base)
    if len(now) > len(base):
        why.append(f"{len(now) - len(base)} process(es) outlive it")
    if now != base and case["name"].removeprefix("example_").startswith(("tamper_", "escape_")):
        why.append("the server did not survive it")
    after = box.judge(**job_of(HONEST_ADD, kind, tests["add"], None))
    if not after.passed:
        why.append(f"the next honest program: {after.status} {after.message[:200]}")
    return dict(name=case["name"], kind=kind, status=result.status, held=not why, why=why, seconds=round(seconds, 2))


# ---------------------------------------------------------------------------------------------------------------------
# honest and wrong programs


def read_program(path, sandbox):
    """(code, function tests, expected statuses) of a file in honest/ or wrong/."""
    code, pairs, expect = path.read_text(), [], None
    names = {"math": math, "Raises": sandbox.Raises, "Approx": sandbox.Approx}
    for line in code.split("\n"):
        if line.startswith("# test: "):
            arguments, value = line.removeprefix("# test: ").split(" -> ")
            pairs.append((eval(arguments, names), eval(value, names)))
        elif line.startswith("# expect: "):
            expect = line.removeprefix("# expect: ").split("|")
        else:
            break
    return code, pairs, expect


def programs(kind):
    return sorted((HERE / kind).glob("*.py"))


def judge_program(box, sandbox, path):
    code, pairs, expect = read_program(path, sandbox)
    result = box.judge(code, pairs, entry="f")
    right = result.status in expect and result.passed == (expect == ["pass"])
    right = right and all(result.per_test) == result.passed and len(result.per_test) in (0, len(pairs))
    why = [] if right else [f"status {result.status}, expected {expect}: {result.message}"]
    return dict(name=path.stem, kind=path.parent.name, status=result.status, held=right, why=why, seconds=result.wall_s)


# ---------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, description="attacks and honest programs against sandbox.py")
    parser.add_argument("--root", type=Path, required=True, help="folder that holds sandbox.py")
    parser.add_argument("--examples", type=Path, default=Path("nowhere"), help="folder of further attack files")
    parser.add_argument("--tier", choices=["ns", "landlock"], required=True, help="tier to run in")
    parser.add_argument("--quick", action="store_true", help="leave out most of the cases that wait for a limit")
    parser.add_argument("--only", default="", help="run the files whose name holds this text")
    args = parser.parse_args()
    sys.path.insert(0, str(args.root))
    import sandbox

    become_subreaper()
    os.environ["NANOPOST_CANARY"] = CANARY  # must not reach a candidate's environment
    tests = make_tests(sandbox)
    host = Host()
    os.chdir(host.dir)  # what is written to "." shows
    print(json.dumps(dict(name="start", uid=os.getuid(), tier=args.tier)), flush=True)
    try:
        pool = sandbox.Sandbox(workers=1, tier=args.tier)
    except sandbox.SandboxUnavailable as error:
        print(json.dumps(dict(name="unavailable", why=[str(error)])))
        host.close()
        sys.exit(3)
    with pool as box:
        for kind in ("function", "unittest"):  # starts what is started on first use
            box.judge(**job_of(HONEST_ADD, kind, tests["add"], None))
        time.sleep(0.3)  # the warm-up's programs are gone by then
        base = descendants(os.getpid())
        for case in all_cases(args.examples):
            if args.only in case["name"] and (is_quick(case) or not args.quick):
                for kind in quick_kinds(case, args.tier) if args.quick else kinds_of(case):
                    print(json.dumps(attack(box, sandbox, case, kind, tests, host, base)), flush=True)
                    base = settle(base)  # a replaced server has another pid
        for path in programs("honest") + programs("wrong"):
            if args.only in path.stem:
                print(json.dumps(judge_program(box, sandbox, path)), flush=True)
        tier = box.tier
    left = settle(set())
    why = [f"{len(left)} process(es) outlive the pool"] if left else []
    why += [] if tier == args.tier else [f"asked for {args.tier}, ran in {tier}"]
    print(json.dumps(dict(name="end", kind="pool", status=tier, held=not why, why=why + host.breaches())), flush=True)
    host.close()
