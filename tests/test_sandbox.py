# ruff: noqa: E501 - the programs under test stand in strings, most of them on one line
"""The sandbox itself: verdicts, values, limits, isolation, faults, and what happens when a primitive is taken away."""

import contextlib
import errno
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import FrozenInstanceError
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sandbox  # noqa: E402
from sandbox import Approx, Limits, Raises, Sandbox, SandboxUnavailable  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ADD = "def add(a, b):\n    return a + b\n"
SUM = [([1, 2], 3), ([5, 7], 12)]
SUM_MODULE = """
import unittest
from adder import add
class AddTest(unittest.TestCase):
    def test_a(self): self.assertEqual(add(1, 2), 3)
    def test_b(self): self.assertEqual(add(5, 7), 12)
"""


# Tests that differ little between the tiers: the default run has one of them.
mostly_ns = pytest.mark.parametrize("box", ["ns", pytest.param("landlock", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module", params=["ns", "landlock"])
def box(request):
    with Sandbox(workers=2, tier=request.param) as box:
        assert box.tier == request.param
        yield box
        assert box.faults == 0


def judge(box, code, tests, **more):
    return box.judge(textwrap.dedent(code), textwrap.dedent(tests) if isinstance(tests, str) else tests, **more)


def sockets_and_processes():
    children = [p for p in os.listdir("/proc") if p.isdigit() and parent_of(p) == os.getpid()]
    return len(os.listdir("/proc/self/fd")), len(children), len(Path("/proc/self/mounts").read_text().splitlines())


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def descendants(pid):
    found = [int(p) for p in os.listdir("/proc") if p.isdigit() and parent_of(p) == pid]
    return found + [d for child in found for d in descendants(child)]


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts of function tasks


def test_right_and_wrong(box):
    result = box.judge(ADD, SUM)
    assert result.passed and result.status == "pass" and result.per_test == (True, True) and result.tier == box.tier
    assert 0 < result.cpu_s < 1 and 0 < result.wall_s < 3 and 1 < result.rss_mb < 200
    with pytest.raises(FrozenInstanceError):
        result.status = "pass"
    result = box.judge("def add(a, b):\n    return a + b if a == 1 else 0\n", SUM)
    assert (result.status, result.per_test) == ("fail", (True, False))


@pytest.mark.parametrize(
    "expression, want, passes",
    [
        ("2", 2.0, True),
        ("True", 1, True),
        ("1", 2, False),
        ("'3'", 3, False),
        ("(1, 2)", (1, 2), True),
        ("[1, 2]", (1, 2), False),
        ("{1, 2}", {2, 1}, True),
        ("frozenset({1})", {1}, True),
        ("{'a': [1, (2, None)]}", {"a": [1, (2, None)]}, True),
        ("float('nan')", math.nan, True),
        ("float('nan')", 1.0, False),
        ("float('nan')", Approx(1.0, 9e9), False),
        ("[0.1 + 0.2, 'x']", [Approx(0.3, 1e-9), "x"], True),
        ("0.1 + 0.2", 0.3, False),
        ("float('inf')", Approx(math.inf, 0), True),
        ("10 ** 5000", 10**5000, True),
        ("-0.0", 0.0, True),
        ("'h\\u00e9\\U0001F600\\udc80'", "h\u00e9\U0001f600\udc80", True),
        ("b'\\x00\\xff'", b"\x00\xff", True),
        ("1 + 2j", 1 + 2j, True),
        ("range(3)", range(3), True),
        ("type('L', (list,), {})([1])", [1], True),
        ("__import__('collections').Counter('aab')", {"a": 2, "b": 1}, True),
        ("(x for x in [1])", [1], False),
        ("object()", None, False),
        ("__import__('decimal').Decimal('1.5')", Decimal("1.5"), True),
        ("__import__('decimal').Decimal('sNaN')", 1, False),
        ("10 ** 400", Approx(1.0, 1.0), False),
        ("__import__('fractions').Fraction(1, 3)", Fraction(1, 3), True),
    ],
    ids=lambda v: type(v).__name__,
)
def test_comparison(box, expression, want, passes):
    assert box.judge(f"def f():\n    return {expression}\n", [([], want)]).passed is passes


def test_exceptions_match_only_what_expects_them(box):
    code = """
    class Own(ValueError): pass
    def f(kind):
        if kind == "own": raise Own("no good")
        if kind == "exit": raise SystemExit(0)
        if kind == "key": raise KeyboardInterrupt
        return kind
    """
    assert judge(box, code, [(["own"], Raises("Own")), (["own"], Raises("ValueError", "no good")), (["x"], "x")]).passed
    for kind, want in [
        ("own", "no good"),
        ("own", Raises("KeyError")),
        ("own", Raises("ValueError", "other")),
        ("x", Raises("ValueError")),
        ("exit", Raises("SystemExit")),
        ("key", Raises("KeyboardInterrupt")),
        ("exit", None),
        ("key", None),
    ]:
        assert not judge(box, code, [([kind], want)]).passed, kind


@pytest.mark.parametrize(
    "code, status",
    [
        ("def f(:\n", "error"),
        ("raise ValueError('x')\ndef f(): pass", "error"),
        ("import os; os._exit(0)", "protocol"),
        ("x = 1", "error"),
        ("def f():\n    import os; os._exit(0)", "protocol"),
        ("def f():\n    import os; os._exit(3)", "error"),
        ("def f():\n    import os; os.close(3); return 1", "error"),
        ("def f():\n    import os; os.write(3, b'[1]\\n'); return 1", "protocol"),
        ("def f():\n    import os\n    os.write(3, b'[\"v\", 1]\\n')\n    return 1", "protocol"),
        ("def f():\n    import os\n    os.write(3, b'[\"v\", 1]\\n'); os.write(3, b'x'); os._exit(0)", "protocol"),
        ("def f():\n    return [1] * 200_000", "fail"),
        ("def f():\n    x = []\n    for _ in range(99): x = [x]\n    return x", "fail"),
        ("def f():\n    import os\n    while True: os.write(3, b'[' * 9999)", "output"),
        ("def f():\n    import ctypes; return ctypes.string_at(0)", "error"),
        ("import sys; sys.exit(0)", "error"),
    ],
)
def test_what_is_not_a_result(box, code, status):
    result = box.judge(code, [([], 1)])
    assert (result.status, result.per_test) == (status, (False,)), result


def test_messages_hold_no_test_data_unless_asked(box):
    code = "def f(x):\n    return x"
    assert "4711" not in box.judge(code, [([1], 4711)]).message
    assert "got 1, want 4711" in box.judge(code, [([1], 4711)], detail=True).message
    tests = "import unittest, m\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(m.f(1), 4711)\n"
    assert "4711" not in box.judge(code, tests).message and "test_it" in box.judge(code, tests).message
    assert "4711" in box.judge(code, tests, detail=True).message
    result = box.judge("def f(x):\n    raise ValueError('\\udc80\\x1b' + 'x' * 9999)", [([1], 1)], detail=True)
    assert len(result.message) <= 500 and result.message.encode() and "\x1b" not in result.message


@mostly_ns
def test_entry_and_arguments(box):
    code = "def g(x):\n    return 2 * x\ndef f(x):\n    return g(x)\nasync def h(): pass\ndef last(x):\n    return 3 * x\nclass C:\n    def m(self): pass\n"
    assert box.judge(code, [([4], 12)]).passed and box.judge(code, [([4], 8)], entry="g").passed
    assert box.judge(
        "def f(d, s, t):\n    return [sorted(d), s, t]", [([{"b": 1, "a": 2}, {3}, (4,)], [["a", "b"], {3}, (4,)])]
    ).passed
    assert box.judge(
        "def f(x):\n    return len(x)", [([list(range(10**6))], 10**6)], limits=Limits(wall_s=20, cpu_s=15)
    ).passed
    for tests, kind in [([], ValueError), ([([object()], 1)], TypeError)]:
        with pytest.raises(kind):
            box.judge(code, tests)
    with pytest.raises(TypeError, match="NoneType"):
        box.judge(None, SUM)
    with pytest.raises(ValueError, match="wall_s"):
        Limits(wall_s=-1)


# ---------------------------------------------------------------------------------------------------------------------
# unittest modules


def test_module(box):
    result = box.judge(ADD, SUM_MODULE, expect_tests=2)
    assert result.passed and result.per_test == (True, True)
    assert box.judge(ADD, SUM_MODULE).passed
    assert box.judge(ADD, SUM_MODULE, expect_tests=3).status == "fail"
    assert box.judge("def add(a, b):\n    return 3\n", SUM_MODULE, expect_tests=2).per_test == (True, False)
    assert (
        box.judge("x = 1", SUM_MODULE).status == "error"
        and box.judge("import os; os._exit(0)", SUM_MODULE).status == "error"
    )
    assert box.judge(ADD, "import unittest, adder\n").status == "fail"  # no test is no pass
    with pytest.raises(ValueError, match="module="):
        box.judge(ADD, "import unittest\n")


def test_module_with_objects(box):
    code = """
    import collections, enum
    LIMIT = 7
    class BankError(Exception):
        def __init__(self, text): self.text = text; super().__init__(text)
    class Colour(enum.Enum):
        RED = 1
    class Point:
        count = 0
        def __init__(self, x, y=0): self.x, self.y = x, y
        def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
        def __hash__(self): return hash((self.x, self.y))
        def __add__(self, other): return Point(self.x + (other.x if isinstance(other, Point) else other), self.y)
        def __repr__(self): return f"Point({self.x})"
        def __len__(self): return 2
        def __iter__(self): return iter((self.x, self.y))
        def __lt__(self, other): return self.x < other.x
        def __getitem__(self, i): return (self.x, self.y)[i]
        def __enter__(self): return self
        def __exit__(self, *error): self.y = error[0] is not None
    def fail(text): raise BankError(text)
    def count(text): return collections.Counter(text)
    def each(f, xs): return [f(x) for x in xs]
    def numbers():
        n = 0
        while True:
            yield n
            n += 1
    def guarded(f):
        try: return f(0)
        except ZeroDivisionError: return "caught"
    """
    tests = """
    import unittest
    from helper import DOUBLE
    from shapes import *
    import shapes
    class ShapesTest(unittest.TestCase):
        def test_data(self):
            self.assertEqual((LIMIT, shapes.LIMIT, count("aab")), (7, 7, {"a": 2, "b": 1}))
        def test_exception(self):
            with self.assertRaises(BankError) as caught: fail("empty")
            self.assertEqual((caught.exception.args[0], str(caught.exception)), ("empty", "empty"))
            self.assertRaisesRegex(Exception, "emp.y", fail, "empty")
        def test_objects(self):
            p = Point(1, y=2)
            self.assertEqual(p, Point(1, 2)); self.assertNotEqual(p, Point(2)); self.assertNotEqual(p, (1, 2))
            self.assertEqual((p.x, p[1], len(p), list(p), repr(p), str(p + p)), (1, 2, 2, [1, 2], "Point(1)", "Point(2)"))
            self.assertEqual(p + 4, Point(5, 2)); self.assertEqual(len({p, Point(1, 2)}), 1)
            self.assertIsInstance(p, Point); self.assertNotIsInstance(3, Point); self.assertIn(2, p); self.assertIn(p, [Point(1, 2)])
            self.assertEqual([q.x for q in sorted([Point(3), Point(1)])], [1, 3])
            p.x = 9; self.assertEqual(p.x, 9); Point.count = 5; self.assertEqual(Point(1).count, 5)
            with p as q: self.assertIs(q, p)
            with self.assertRaises(KeyError):
                with p: raise KeyError("x")
            self.assertIs(p.y, True)
            with self.assertRaises(AttributeError): p.missing
        def test_enum(self):
            self.assertIs(Colour.RED, Colour.RED); self.assertEqual(Colour.RED.name, "RED"); self.assertIs(Colour(1), Colour.RED)
        def test_callbacks(self):
            self.assertEqual(each(lambda x: DOUBLE * x, [1, 2]), [2, 4])
            self.assertEqual(each(lambda p: p.x, [Point(3)]), [3])
            self.assertEqual(guarded(lambda x: 1 / x), "caught")
        def test_generator(self):
            n = numbers(); self.assertEqual([next(n), next(n)], [0, 1]); self.assertTrue(iter(n)); del n
    """
    result = judge(box, code, tests, helpers={"helper.py": "DOUBLE = 2\n"}, expect_tests=6, detail=True)
    assert result.passed, result


FORGED = {
    "equal": "def f(x):\n    return Liar()",
    "subclass": "class I(int, Liar): pass\ndef f(x):\n    return I(0)",
    "skip": "import unittest\ndef f(x):\n    raise unittest.SkipTest('x')",
    "skip at import": "import unittest\nraise unittest.SkipTest('x')",
    "exit": "def f(x):\n    raise SystemExit(0)",
    "die": "def f(x):\n    import os; os._exit(0)",
    "patch": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.TestCase.run = lambda *a: None\ndef f(x):\n    return 0",
    "names": "class SkipTest(Exception): pass\n_ShouldStop = SkipTest\ndef f(x):\n    raise SkipTest('x')",
    "star": "class unittest: pass\nabs = len = bool = lambda *a: 0\ndef isclose(*a): return True\ndef f(x):\n    return 0",
    "write": 'def f(x):\n    import os\n    for fd in range(3, 64):\n        try: os.write(fd, b\'["test", true, ""]\\n["done", 1, false]\\n\')\n        except OSError: pass\n    return 0',
    "link": "def f(x):\n    import os, struct\n    b = b'[\"v\", 4.0]'\n    os.write(4, struct.pack('>I', len(b)) + b)\n    return 0",
    "callback": "def f(x):\n    import __main__\n    return 0",
    "proxy": "class f(dict):\n    __eq__ = __ne__ = __lt__ = __contains__ = lambda *a: True\n    def __new__(cls, x): return Liar()",
}
LIAR = """class Liar:
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda *a: True
    __hash__ = lambda self: 4
    __sub__ = __rsub__ = __add__ = __radd__ = __round__ = __abs__ = __float__ = __int__ = __index__ = __neg__ = __mod__ = lambda *a: Zero(0)
class Zero(float, Liar): pass
"""


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize(
    "check",
    [
        "self.assertEqual(f(2), 4.0)",
        "self.assertEqual(4.0, f(2))",
        "assert f(2) == 4.0",
        "self.assertAlmostEqual(f(2), 4.0)",
        "assert abs(f(2) - 4.0) < 1e-6",
        "assert abs(4.0 - f(2)) < 1e-6",
        "assert not (f(2) - 4.0)",
        "self.assertIn(f(2), [4.0])",
        "self.assertGreater(f(2), 3.0)",
        "assert 3.0 < f(2) < 5.0",
        "assert isclose(f(2), 4.0)",
        "self.assertEqual([f(2)], [4.0])",
    ],
)
def test_forged_verdicts(box, how, check):
    if box.tier == "ns" or "assertEqual(f" in check:  # the tiers do not differ here: all in one, some in the other
        tests = f"import unittest\nfrom math import isclose\nfrom forged import *\nclass T(unittest.TestCase):\n    def test_it(self):\n        {check}\n"
        if how == "link" and "f(2)" in check:
            tests = tests.replace("4.0", "5.0").replace(
                "3.0", "4.5"
            )  # the forged reply is data, as a wrong answer may be
        result = box.judge(LIAR + FORGED[how], tests, module="forged", expect_tests=1)
        assert not result.passed and result.per_test in ((), (False,)), result


def test_tests_that_do_not_pass_are_not_passed(box):
    body = "import unittest, adder\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(adder.add(1, 2), 3)\n"
    for extra in (
        "    @unittest.skip('x')\n    def test_b(self): pass\n",
        "    @unittest.expectedFailure\n    def test_b(self): self.fail()\n",
        "    @unittest.expectedFailure\n    def test_b(self): pass\n",
        "    def test_b(self):\n        with self.subTest(): self.fail()\n",
        "    @classmethod\n    def setUpClass(cls): raise ValueError\n",
        "    def tearDown(self): raise ValueError\n",
        "    def test_b(self):\n        adder.add(Test(), 1)\nclass Test: pass\n",
    ):
        assert not box.judge(ADD, body + extra).passed, extra


def test_an_assertion_in_a_callback_counts(box):
    code = "def call(f):\n    try: f(3)\n    except Exception: pass\n    return 1\n"
    tests = "import unittest, m\nclass T(unittest.TestCase):\n    def test_it(self): m.call(lambda x: self.assertEqual(x, 4))\n"
    assert box.judge(code, tests).status == "fail" and box.judge(code, tests.replace("4", "3")).passed


def test_plain_refuses_objects(box):
    code = "class Text:\n    def startswith(self, x): return True\ndef f(): return Text()\n"
    tests = "import unittest, m\nclass T(unittest.TestCase):\n    def test_it(self): self.assertTrue(m.f().startswith('abc'))\n"
    assert box.judge(code, tests).passed and not box.judge(code, tests, plain=True).passed
    assert box.judge("def f(): return 'abcd'", tests, plain=True).passed


# ---------------------------------------------------------------------------------------------------------------------
# run


@mostly_ns
def test_run(box):
    result = box.run("name = input()\nprint('hi', name)\nprint(__name__)", stdin="B\u00e9a\n")
    assert (result.status, result.output, result.per_test) == ("pass", "hi B\u00e9a\n__main__\n", ())
    assert box.run("print(open(0).read())", stdin="x" * 5000).output == "x" * 5000 + "\n"
    result = box.run("def f():\n    return 1 / 0\nf()\n")
    assert (
        result.status == "error"
        and "line 2, in f\n    return 1 / 0" in result.output
        and "ZeroDivisionError" in result.output
    )
    assert "sandbox" not in result.output
    assert [
        box.run(c).status
        for c in ("exit()", "import sys; sys.exit(3)", "while True: pass", "x = 'x' * 10 ** 10", "syntax error")
    ] == ["pass", "error", "timeout", "memory", "error"]
    result = box.run("import threading\nthreading.Thread(target=lambda: print('late')).start()")
    assert result.output == "late\n"
    result = box.run("print('a' * 50_000)\nprint('b' * 50_000)\nprint('c' * 50_000)\nprint('end')")
    assert result.status == "pass" and len(result.output) < 66_000 and "bytes cut" in result.output
    assert result.output.startswith("aaa") and result.output.endswith("ccc\nend\n")
    assert box.run("x" * 70_000).status == "error"


# ---------------------------------------------------------------------------------------------------------------------
# Limits and isolation

LIMITED = [
    ("while True: pass", "timeout"),
    ("import time; time.sleep(30)", "timeout"),
    ("return bytearray(2 << 30)", "memory"),
    ("x = []\n    while True: x.append(bytearray(1 << 24))", ("memory", "timeout")),  # it writes to every page
    ("print('x' * 10 ** 5)\n    return 1", "output"),
    ("import sys; sys.stderr.write('x' * 10 ** 6)\n    return 1", "output"),
    ("print('x' * 50_000)\n    return 1", "pass"),
    ("import os\n    while True: os.write(1, b'x' * 65536)", ("output", "timeout")),
    ("return 'x' * (2 << 20)", "output"),
    ("import re; return re.match('(a+)+$', 'a' * 40 + 'b')", "timeout"),
    ("f = lambda: f()\n    f()", "fail"),
    (
        "import sys; sys.setrecursionlimit(10 ** 8)\n    f = lambda: f() + 1\n    return f()",
        ("memory", "error", "timeout"),
    ),
    (
        "import signal, time\n    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\n    while True: pass",
        "timeout",
    ),
    ("return 9 ** 9 ** 9", ("timeout", "memory")),
    ("import time\n    time.sleep(0.2)\n    return 1", "pass"),
]


def test_limits(box):
    limits = Limits(wall_s=0.8, cpu_s=0.7, memory_mb=256)
    jobs = [dict(code=f"def f():\n    {body}\n", tests=[([], 1)], limits=limits) for body, _ in LIMITED]
    for (body, status), result in zip(LIMITED, box.judge_many(jobs)):
        assert result.status in (status if isinstance(status, tuple) else (status,)), (body, result)
        assert result.wall_s < 2.8 and result.rss_mb < 300, (body, result)
    result = box.judge("def f():\n    while True: pass", [([], 1)], limits=Limits(wall_s=20, cpu_s=0.6))
    assert result.status == "timeout" and "CPU" in result.message and 0.6 <= result.cpu_s < 1.2


def test_threads(box):
    code = """
    import threading, time
    def f(n):
        done = threading.Event()
        threads = [threading.Thread(target=done.wait, args=(20,)) for _ in range(n)]
        try:
            for t in threads: t.start()
            time.sleep(0.1)
        except RuntimeError: return "refused"
        finally: done.set()
        for t in threads: t.join()
        return n
    """
    assert judge(box, code, [([10], 10)]).passed
    result = judge(box, code, [([100], "refused")])
    # without a limit of threads, memory may stop them before the server has counted them
    assert result.passed or box.tier == "landlock" and result.status == "error" and "threads" in result.message


def test_files(box):
    code = """
    import errno, os, tempfile
    def f(what):
        try:
            if what == "scratch":
                with tempfile.NamedTemporaryFile("w+") as file:
                    file.write("x"); file.seek(0); return file.read()
            if what == "many":
                files = [open(os.devnull) for _ in range(100)]
            if what == "big":
                with open("/tmp/big", "wb") as file:
                    for _ in range(40): file.write(bytes(1 << 20)); file.flush()
            if what == "inodes":
                for i in range(1000): open(f"/tmp/{i}", "w").close()
            if what == "left": return os.listdir("/tmp")
        except OSError as error: return errno.errorcode[error.errno]
        return "done"
    """
    wanted = (
        {"many": "EMFILE", "scratch": "x", "big": "EFBIG", "inodes": "ENOSPC"}
        if box.tier == "ns"
        else {"many": "EMFILE", "scratch": "ENOENT", "big": "EACCES", "inodes": "EACCES"}
    )
    for what, want in wanted.items():
        result = judge(box, code, [([what], want)], detail=True)
        assert result.passed, result
    if box.tier == "ns":
        assert judge(box, code, [(["left"], [])]).passed


@pytest.mark.parametrize(
    "attempt",
    [
        "open({canary!r}).read()",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['x'], {{}})",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['x'])",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_connection(('127.0.0.1', {port}))",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "open('/proc/self/maps')",
        "open('/etc/passwd')",
        "os.listdir('/')[999]",
        "open('/dev/shm/x', 'w')",
        "open('/var/tmp/x', 'w')",
        "os.kill(os.getppid() or -1, 0)",
        "os.kill(-1, 0)",
        "os.killpg(0, 0)",
        "os.chmod('/tmp', 0o777)",
        "os.utime('/usr/lib')",
        "os.chown('/usr/lib', 0, 0)",
        "os.mkdir('/usr/lib/x')",
        "os.remove({canary!r})",
        "os.memfd_create('x')",
        "os.setxattr('/tmp', 'user.x', b'')",
        "os.listxattr({canary!r})",
        "os.getxattr({canary!r}, 'user.x')",
        "os.readlink('/proc/self/exe')",
        "socket.socketpair(socket.AF_INET)",
        "libcall('syncfs', 1)",
        "os.symlink('/', '/usr/lib/x')",
        "os.rename('/usr/lib', '/usr/x')",
        "os.nice(1)",
        "os.sched_setaffinity(0, [0])",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "resource.prlimit(1 if os.getpid() != 1 else 2, resource.RLIMIT_CPU, (1, 1))",
        "os.pidfd_open(os.getpid())",
        "libcall('unshare', 0x10000000)",
        "libcall('setns', 0, 0)",
        "libcall('mount', b'x', b'/tmp', b'tmpfs', 0, b'')",
        "libcall('chroot', b'/')",
        "libcall('ptrace', 0, 0, 0, 0)",
        "libcall('prctl', 1, 0)",
        "libcall('prctl', 4, 1)",
        "libcall('personality', 0)",
        "libcall('shmget', 1, 4096, 0o1600)",
        "fcntl.fcntl(1, fcntl.F_SETOWN, 1)",
        "libcall('syscall', 425, 1, 0)",
        "libcall('syscall', 435, 0, 0)",
        "libcall('syscall', 444, 0, 0, 1)",
        "libcall('keyctl', 0, 0)",
        "os.sync() or 1 / 0",
        "libcall('inotify_init')",
        "libcall('mq_open', b'/x', 0o102, 0o600, 0)",
        "libcall('sethostname', b'x', 1)",
        "libcall('bpf', 0, 0, 0)",
    ],
)
def test_escapes_are_refused(box, attempt, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = attempt.format(canary=str(canary), port=server.getsockname()[1])
        code = f"""
    import ctypes, fcntl, os, resource, socket, subprocess
    def libcall(name, *args):
        libc = ctypes.CDLL(None, use_errno=True)
        if name == "keyctl": name, args = "syscall", (250 if os.uname().machine == "x86_64" else 219, 0, -3)
        if name == "bpf": name, args = "syscall", (321 if os.uname().machine == "x86_64" else 280, 0, 0, 0)
        if getattr(libc, name)(*args) == -1: raise OSError(ctypes.get_errno(), "held")
    def f():
        try: {attempt}
        except (OSError, IndexError, ZeroDivisionError, AttributeError, ValueError): return "held"
        return "done"
    """
        result = judge(box, code, [([], "held")], detail=True)
    assert result.passed, result
    assert canary.read_text() == "secret"


def test_what_honest_programs_need(box):
    code = """
    import asyncio, math, random, statistics, sys, threading, zoneinfo, datetime, hashlib, zlib, sqlite3, json, queue, uuid, csv
    from concurrent.futures import ThreadPoolExecutor
    async def work(n):
        await asyncio.sleep(0.01)
        return n
    async def all_work(): return sum(await asyncio.gather(*[work(i) for i in range(5)]))
    def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
    def f(what):
        if what == "asyncio": return asyncio.run(all_work())
        if what == "pool":
            with ThreadPoolExecutor(4) as pool: return list(pool.map(abs, [-1, -2]))
        if what == "deep": return deep(900)
        if what == "too deep":
            try: deep(10 ** 6)
            except RecursionError: return "stopped"
        if what == "zone": return str(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")).utcoffset())
        if what == "hash": return hashlib.sha256(b"").hexdigest()[:8] + str(zlib.crc32(b"x"))
        if what == "sql": return sqlite3.connect(":memory:").execute("select 1 + 1").fetchone()
        if what == "random": return random.random()
        if what == "env": import os; return dict(os.environ)
        if what == "argv": return (sys.argv, sys.stdin.read())
        if what == "nested": return {"x": {1: [(), {frozenset({1, 2})}]}}
        if what == "main": return [__name__, sys.modules[__name__].f is f]
        if what == "hash seed": return hash("x") == hash("x")
    """
    seeded = __import__("random").Random(0).random()
    wanted = [
        ("asyncio", 10),
        ("pool", [1, 2]),
        ("deep", 900),
        ("too deep", "stopped"),
        ("zone", "2:00:00"),
        ("hash", "e3b0c4422363233923"),
        ("sql", (2,)),
        ("env", {}),
        ("argv", ([""], "")),
        ("nested", {"x": {1: [(), {frozenset({1, 2})}]}}),
        ("main", ["candidate", True]),
    ]
    if not os.path.isdir("/usr/share/zoneinfo"):
        wanted.remove(("zone", "2:00:00"))
    result = judge(box, code, [([what], want) for what, want in wanted] + [(["hash seed"], True)], detail=True)
    assert result.passed, result
    assert judge(box, code, [(["random"], seeded)]).passed  # the same in every run


def test_no_note_reaches_a_later_program(box):
    note = "marker-" + "4711" * 4
    leave = f"import sys, builtins, os\nbuiltins.note = {note!r}\nsys.path.append({note!r})\nprint({note!r})\ndef f():\n    return {note!r}"
    find = """
    import builtins, gc, linecache, os, sys
    def f():
        mark = "marker-" + "4711" * 4
        if hasattr(builtins, "note") or mark in sys.path or mark in str(linecache.cache) or mark in os.environ.values(): return "found"
        for thing in gc.get_objects():
            if isinstance(thing, (dict, list, tuple)) and any(isinstance(x, (str, bytes)) and len(x) < 10 ** 6 and mark in str(x) for x in
                    (thing.values() if isinstance(thing, dict) else thing)): return "found"
        return "clean"
    """
    find = find.replace('"marker-" + "4711" * 4', "''.join(['mar', 'ker-', *['4711'] * 4])")
    for _ in range(2):
        assert box.judge(leave, [([], note)]).passed
    for _ in range(2):
        result = judge(box, find, [([], "clean")], detail=True)
        assert result.passed, result


def test_tests_are_nowhere_in_the_candidate(box):
    code = """
    import gc, sys
    def f():
        for name in list(sys.modules):
            if "hidden" in name: return "found"
        texts = [x for t in gc.get_objects() if isinstance(t, (dict, list, tuple)) for x in (t.values() if isinstance(t, dict) else t) if isinstance(x, str)]
        return "found" if any("".join(["assert", "Equal(m.f(), 'cl"]) in x for x in texts) else "clean"
    """
    tests = "import unittest, m\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(m.f(), 'clean')\n"
    assert judge(box, code, tests).passed and judge(box, code, tests).passed


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**63,
        -(2**70),
        10**9000,
        0.1,
        -0.0,
        math.inf,
        "",
        "\udc80\x00",
        b"",
        bytearray(b"x"),
        1j,
        range(1, 9, 2),
        [],
        (),
        {},
        set(),
        frozenset({1}),
        [1, (2, {3: {4}})],
        {(1, 2): {"a": None}},
        date(2024, 2, 29),
        datetime(2024, 1, 1, 2, 3, 4, 5),
        timedelta(-1, 5, 6),
        Decimal("1.50"),
        Fraction(-1, 3),
        {"i": 1},
        {"t": [1]},
        [{"o": "x"}],
        True,
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_round_trip(value):
    back = sandbox.decode(sandbox.read_json(json.dumps(sandbox.encode(value)).encode()))
    assert back == value and type(back) is type(value) and (value != 0 or str(back) == str(value))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1,]",
        '{"q": 1}',
        '{"t": 1}',
        '{"t": [1], "s": [2]}',
        "{}",
        '{"i": 5}',
        '{"i": "zz"}',
        '{"d": [[1]]}',
        '{"d": [[[1], 2]]}',
        '{"s": [[1]]}',
        '{"b": "0"}',
        '{"c": [1, 2]}',
        '{"r": [1, 2, 0]}',
        '{"dt": [1, 2]}',
        '{"da": [0, 0, 0]}',
        '{"da": [true, 1, 1]}',
        '{"de": 1}',
        '{"fr": [1, 0]}',
        '{"p": 0}',
        '{"e": ["ValueError"]}',
        '{"f": 0}',
        "1" * 50,
        "[" * 100 + "]" * 100,
        "[" * 100_000,
        "[" + "1," * 100_001 + "1]",
        "\xff",
        '{"o": 1}',
        '{"i": "0x' + "f" * 100_010 + '"}',
        '{"de": "' + "1" * 5000 + '"}',
        '{"i": ["0x1"]}',
        '{"td": [9999999999, 0, 0]}',
    ],
    ids=lambda text: text[:9],
)
def test_malformed_values_are_refused(text):
    with pytest.raises(ValueError):
        sandbox.decode(sandbox.read_json(text.encode("latin-1")))


def test_hostile_values_cost_little():
    started = time.monotonic()
    prime = 2**61 - 1  # multiples of it all have hash 0
    for kind in ('{"s": [%s]}', '{"fs": [%s]}'):
        with pytest.raises(ValueError, match="hash"):
            sandbox.decode(
                sandbox.read_json((kind % ",".join('{"i": "%#x"}' % (prime * i) for i in range(20_000))).encode())
            )
    sandbox.decode({"s": list(range(90_000))})
    assert time.monotonic() - started < 3
    with pytest.raises(ValueError, match="nested"):
        deep = []
        deep.append(deep)
        sandbox.encode(deep)
    with pytest.raises(TypeError, match="object"):
        sandbox.encode([object()])


def test_proxies_do_not_reach_the_wire_as_data():
    class Lying(int):
        def __pos__(self):
            return 7

        def __int__(self):
            return 7

        __class__ = str

    assert sandbox.encode(Lying(3)) == 3


# ---------------------------------------------------------------------------------------------------------------------
# The seccomp program, run by hand for both machines


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_seccomp_program(machine, links, monkeypatch):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: machine)
    raw = sandbox.bpf(77, links=links)
    program = [struct.unpack("HBBI", raw[i : i + 8]) for i in range(0, len(raw), 8)]
    column, arch, last, rseq = sandbox.ARCHES[machine]

    def verdict(number, *args, arch=arch):
        words = {0: number, 4: arch} | {16 + 8 * i: a & 0xFFFFFFFF for i, a in enumerate(args + (0,) * (6 - len(args)))}
        at = accumulator = 0
        while True:
            code, true, false, k = program[at]
            at += 1
            if code == 0x06:
                return {0x7FFF0000: "allow", 0x50001: "EPERM", 0x50026: "ENOSYS", 0x80000000: "kill"}[k]
            if code == 0x20:
                accumulator = words[k]
            elif code == 0x05:
                at += k
            else:
                at += (
                    true
                    if {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
                    else false
                )

    denied = {n[column] for n in (sandbox.DENIED | ({} if links else sandbox.LINKS)).values()}
    calls = {name: n[column] for name, n in sandbox.CALLS.items() if n[column] not in denied}
    for number in set(range(600)) - set(calls.values()):
        want = (
            "EPERM" if number in denied else "allow" if number <= last or number in (*sandbox.NEWER, rseq) else "ENOSYS"
        )
        assert verdict(number) == want, number
    assert verdict(0, arch=arch ^ 1) == "kill"
    assert machine != "x86_64" or verdict(0x40000001) == "kill"
    threads = 0x3D0F00
    for name, args, want in [
        ("clone", (17,), "EPERM"),
        ("clone", (threads,), "allow"),
        ("clone", (threads | 0x10000000,), "EPERM"),
        ("clone", (0x4111,), "EPERM"),
        ("kill", (77,), "allow"),
        ("kill", (1,), "EPERM"),
        ("kill", (0,), "EPERM"),
        ("kill", (-1,), "EPERM"),
        ("tgkill", (77, 78), "allow"),
        ("tgkill", (5, 5), "EPERM"),
        ("prlimit64", (0,), "allow"),
        ("prlimit64", (5,), "EPERM"),
        ("socketpair", (1, 1), "allow"),
        ("socketpair", (1, 2), "EPERM"),
        ("socketpair", (1, 5), "EPERM"),
        ("socketpair", (2, 1), "EPERM"),
        ("socketpair", (40, 1), "EPERM"),
        ("prctl", (15,), "allow"),
        ("prctl", (1,), "EPERM"),
        ("fcntl", (3, 4), "allow"),
        ("fcntl", (3, 8), "EPERM"),
        ("ioctl", (1, 0x5401), "allow"),
        ("ioctl", (1, 0x5412), "EPERM"),
    ]:
        assert verdict(calls[name], *args) == want, (name, args)


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@mostly_ns
def test_killed_server_gives_no_verdict_of_its_own(box):
    worker = box.workers[0]
    for target in ("keeper", "server"):
        with Sandbox(workers=1, tier=box.tier) as own:
            own.judge(ADD, SUM)
            worker = own.workers[0]
            tree = [worker.process.pid] + descendants(worker.process.pid)
            victim = tree[0] if target == "keeper" else tree[min(1, len(tree) - 1)]
            killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
            killer.start()
            result = own.judge("import time\ndef f():\n    time.sleep(1)\n    return 1\n", [([], 1)])
            killer.join()
            assert result.passed and own.faults == 1
            assert own.judge(ADD, SUM).passed and not own.judge(ADD, [([1, 2], 4)]).passed
            assert not any(os.path.exists(f"/proc/{p}") and parent_of(p) == os.getpid() for p in tree)


@pytest.mark.slow
@pytest.mark.parametrize("tests", [SUM, SUM_MODULE], ids=["function", "unittest"])
def test_processes_killed_at_any_moment(box, tests):
    """Any process below the pool dies at random: each verdict is right, or none is given."""
    import random

    rng, stop, wrong, given, refused = random.Random(0), threading.Event(), [], 0, 0
    good, bad = ADD, "def add(a, b):\n    return a - b\n"
    with Sandbox(workers=1, tier=box.tier) as own:

        def kill_some():
            while not stop.wait(rng.uniform(0.005, 0.12)):
                process = own.workers[0].process
                below = descendants(process.pid) if process else []
                for pid in rng.sample(below, min(1, len(below))):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass  # it ended by itself

        killer = threading.Thread(target=kill_some)
        killer.start()
        try:
            for i in range(150):
                try:
                    result = own.judge((good, bad)[i % 2], tests)
                except SandboxUnavailable:
                    refused += 1
                    continue
                given += 1
                # a killed program is an error of its own; what must not be is a pass for the wrong one
                if result.passed and i % 2 or not result.passed and result.status == "fail" and i % 2 == 0:
                    wrong.append((i, result))
        finally:
            stop.set()
            killer.join()
        assert not wrong and given > 20 and own.faults >= refused, (wrong, given, refused, own.faults)
        assert own.judge(good, tests).passed and not own.judge(bad, tests).passed


@mostly_ns
def test_server_that_keeps_dying_is_an_error(box):
    with Sandbox(workers=1, tier=box.tier) as own:
        stop = threading.Event()

        def kill_all():
            while not stop.is_set():
                for pid in descendants(os.getpid()):
                    server = own.workers[0].process   # once: the other thread may take it away
                    if server is not None and pid == server.pid:
                        with contextlib.suppress(ProcessLookupError):   # gone by itself: this thread must live on
                            os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            with pytest.raises(SandboxUnavailable):
                own.judge("import time\ndef f():\n    time.sleep(2)\n    return 1\n", [([], 1)])
        finally:
            stop.set()
            killer.join()
        assert own.faults >= 1 and own.judge(ADD, SUM).passed


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\n",
        b"{}\n",
        b'{"reason": ""}\n',
        b"\xff" * 100 + b"\n",
        b"[]\n",
        b"1" * 100_000,
        b'{"reason": "", "delay": null, "wall": 0.1, "ended": []}\n',
        b'{"reason": "", "delay": null, "wall": 0.1, "ended": [[0, 0.1, 1.0]]}\n{"x": 1}\n',
    ],
)
def test_garbage_from_a_server(garbage, monkeypatch):
    with Sandbox(workers=1) as own:
        real, sent = sandbox.socket.send_fds, []

        def garbled(sock, buffers, fds):
            # the first program: the parent's own end answers it in place of the server
            if not sent:
                sent.append(sock)
                fake, server = socket.socketpair()
                os.dup2(fake.fileno(), sock.fileno())
                fake.close()
                server.sendall(garbage)
                sent.append(server)
                return len(buffers[0])
            return real(sock, buffers, fds)

        monkeypatch.setattr(sandbox.socket, "send_fds", garbled)
        assert own.judge(ADD, [([1, 2], 4)]).status == "fail" and own.faults == 1
        assert own.judge(ADD, SUM).passed


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.closerange(0, 64)\ndef add(a, b): return a + b",
        "import os\ndef add(a, b):\n    os.closerange(0, 64)\n    return 3",
        "import os\ndef add(a, b):\n    for fd in range(64):\n        try: os.write(fd, b'x' * 100_000)\n        except OSError: pass\n    return 0",
        "import os, threading\nthreading.Thread(target=lambda: [os.write(3, b'[\"v\", 3]\\n') for _ in range(10 ** 9)]).start()\ndef add(a, b): return 3",
        "import socket, array\ndef add(a, b):\n    s = socket.socket(fileno=3)\n    for _ in range(50): s.sendmsg([b'x'], [(1, 1, array.array('i', [1] * 9))])\n    return 0",
    ],
)
def test_descriptors_closed_or_flooded(box, code):
    before = len(os.listdir("/proc/self/fd"))
    for tests in ([([1, 2], 4), ([5, 7], 12)], SUM_MODULE.replace("3)", "4)")):
        assert not box.judge(code, tests).passed
    assert box.judge(ADD, SUM).passed
    assert len(os.listdir("/proc/self/fd")) == before


@mostly_ns
def test_many_threads_at_once(box):
    results, lock = [], threading.Lock()

    def work(n):
        for i in range(n, n + 25):
            result = box.judge(ADD, [([i, 1], i + 1 + i % 2)])
            with lock:
                results.append(result.passed == (i % 2 == 0))

    threads = [threading.Thread(target=work, args=(25 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200 and all(results)
    many = box.judge_many([dict(code=ADD, tests=[([i, 1], i + 1 + i % 2)]) for i in range(500)])
    assert [r.passed for r in many] == [i % 2 == 0 for i in range(500)]
    with pytest.raises(TypeError, match="unexpected keyword"):
        box.judge_many([dict(code=ADD, tests=SUM, test=1)])


SCRIPT = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from sandbox import *
ADD, SUM = {ADD!r}, {SUM!r}
"""


def run_script(body, *prefix, **more):
    return subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


@mostly_ns
def test_interrupt_in_the_middle(box):
    for call in ("box.judge(SLEEP, [([], 1)])", "box.judge_many([dict(code=SLEEP, tests=[([], 1)])] * 6)"):
        done = run_script(f"""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background job inherits it ignored
        SLEEP = "import time\\ndef f():\\n    time.sleep(2)\\n    return 1\\n"
        with Sandbox(workers=2, tier={box.tier!r}) as box:
            box.judge_many([dict(code=ADD, tests=SUM)] * 8)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            started = time.monotonic()
            try: {call}; print("no interrupt")
            except KeyboardInterrupt: print("interrupted", time.monotonic() - started < 1.9)
            print(box.judge(ADD, SUM).status, box.judge(ADD, [([1, 2], 4)]).status)
        """)
        assert done.stdout.split() == ["interrupted", "True", "pass", "fail"], done


def test_nothing_outlives_the_pool(box):
    before = sockets_and_processes()
    with Sandbox(workers=2, tier=box.tier) as own:
        own.judge_many([dict(code=ADD, tests=SUM)] * 20)
        own.judge(ADD, SUM_MODULE)
        tree = descendants(os.getpid())
        for code in (
            "import os\nos.fork()",
            "import subprocess\nsubprocess.Popen(['sleep', '100'])",
            "import time\ntime.sleep(9)",
        ):
            own.judge(code, SUM, limits=Limits(wall_s=0.5, cpu_s=0.4))
    # no more than before; a child of an earlier test may end meanwhile
    assert all(now <= then for now, then in zip(sockets_and_processes(), before))
    mine = [w.process.pid for w in box.workers if w.process]
    assert not [
        p for p in tree if os.path.exists(f"/proc/{p}") and not any(p == m or p in descendants(m) for m in mine)
    ]
    own.close()
    with pytest.raises(RuntimeError, match="closed"):
        own.judge(ADD, SUM)


def test_servers_end_with_a_killed_trainer(box):
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SCRIPT
            + textwrap.dedent(f"""
    box = Sandbox(workers=2, tier={box.tier!r})
    box.judge_many([dict(code=ADD, tests=SUM)] * 8)
    if os.fork() == 0: time.sleep(60); os._exit(0)  # holds a copy of every descriptor
    print("up", flush=True)
    box.judge("import time\\ndef f(): time.sleep(50)", [([], 1)], limits=Limits(wall_s=60))
    """),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert trainer.stdout.readline() == b"up\n"
    time.sleep(0.3)
    tree = [p for p in descendants(trainer.pid) if "--server" in command_of(p)]
    fork = [p for p in descendants(trainer.pid) if "--server" not in command_of(p)]
    assert tree
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 5
    while any("--server" in command_of(p) for p in tree) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [p for p in tree if "--server" in command_of(p)]
    for pid in fork:
        os.kill(pid, signal.SIGKILL)
    trainer.stdout.close()


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_fork_of_the_trainer_does_no_harm(box):
    child = os.fork()
    if child == 0:
        try:
            box.judge(ADD, SUM)
        except RuntimeError:
            box.close()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert box.judge(ADD, SUM).passed


@mostly_ns
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_full_tmp(box):
    done = run_script(f"""
    import sandbox
    sandbox.unshare("ns")
    sandbox.mount("none", "/", "", sandbox.REC | sandbox.PRIVATE)
    sandbox.mount("tmpfs", "/tmp", "tmpfs", 0, "size=4k")
    try:
        open("/tmp/full", "wb").write(bytes(1 << 20))
    except OSError: pass
    with Sandbox(workers=1, tier={box.tier!r}) as box:
        print(box.judge(ADD, SUM).status, box.judge(ADD, [([1, 2], 4)]).status, box.run("print(1)", stdin="x").status)
    """)
    assert done.stdout.split() == ["pass", "fail", "pass"], done


def test_a_starved_timeout_is_tried_again():
    with Sandbox(workers=1) as own:
        real = own.execute

        def starved(jobs, limits, stdin=b""):
            reply, channels, output = real(jobs, limits, stdin)
            if not own.retries:  # as if it had stood in line for a CPU all the time
                reply |= {"reason": "wall", "delay": limits.wall_s}
            return reply, channels, output

        own.execute = starved
        assert own.judge(ADD, SUM).passed and own.retries == 1
        own.retries = 0
        assert [r.passed for r in own.judge_many([dict(code=ADD, tests=SUM)])] == [True] and own.retries == 1
        own.execute = real
        result = own.judge("import time\ndef f(): time.sleep(9)", [([], 1)], limits=Limits(wall_s=0.3, cpu_s=0.2))
        assert result.status == "timeout" and own.retries == 1  # it slept: no second try


def test_servers_are_replaced(monkeypatch):
    monkeypatch.setattr(sandbox, "RECYCLE", 5)
    with Sandbox(workers=1) as own:
        pids = set()
        for _ in range(12):
            assert own.judge(ADD, SUM).passed
            pids.add(own.workers[0].process.pid)
        assert len(pids) == 3 and own.faults == 0


# ---------------------------------------------------------------------------------------------------------------------
# Taking primitives away. The script denies system calls to itself, as a container's seccomp profile does.


def without(denied, body, **more):
    """Runs body in a process whose calls `denied`, {name or number: errno}, fail."""
    return run_script(
        textwrap.dedent(f"""
    import errno, struct, sandbox
    def deny(table):
        column, arch, *_ = sandbox.ARCHES[sandbox.platform.machine()]
        program = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
        for call, code in table.items():
            if call == "seccomp":
                number = sandbox.CALLS["prctl"][column]
                program += [(0x15, 0, 4, number), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, 0x50000 | code), (0x06, 0, 0, 0x7FFF0000)]
                continue
            number = call if isinstance(call, int) else (sandbox.DENIED | sandbox.CALLS)[call][column]
            program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | code)]
        program += [(0x06, 0, 0, 0x7FFF0000)]
        sandbox.libc.prctl(38, 1, 0, 0, 0)
        sandbox.Filter(b"".join(struct.pack("HBBI", *step) for step in program)).install()
    deny({denied!r})
    """)
        + textwrap.dedent(body),
        **more,
    )


CHOOSE = """
    try:
        with Sandbox(workers=1) as box: print(box.tier, box.judge(ADD, SUM).status, box.judge(ADD, [([1, 2], 4)]).status, box.problems)
    except SandboxUnavailable as error: print("refused", error)
    """
DOCKER = {
    "unshare": errno.EPERM,
    "mount": errno.EPERM,
    "setns": errno.EPERM,
    "pivot_root": errno.EPERM,
    "umount2": errno.EPERM,
}


@pytest.mark.parametrize(
    "call, code, step",
    [
        ("unshare", errno.EPERM, "unshare(user+"),
        ("unshare", errno.ENOSPC, "unshare(user+"),
        ("mount", errno.EACCES, "mount("),
        ("pivot_root", errno.EPERM, "pivot_root"),
        ("umount2", errno.EPERM, "umount2"),
        (442, errno.ENOSYS, "mount_setattr"),
        ("setns", errno.EPERM, "setns"),
        ("sethostname", errno.EPERM, ""),
    ],
)
def test_without_a_namespace_primitive(call, code, step):
    done = without({call: code}, CHOOSE)
    tier, right, wrong, problems = done.stdout.split(" ", 3)
    assert (tier, right, wrong) == ("landlock", "pass", "fail"), done
    assert errno.errorcode[code] in problems and (step.replace("user+", "") in problems.replace("user+", "")), problems


def test_under_a_profile_like_dockers():
    done = without(DOCKER, CHOOSE)
    assert done.stdout.startswith("landlock pass fail"), done


@pytest.mark.parametrize(
    "call, code", [(444, errno.ENOSYS), (444, errno.EOPNOTSUPP), (445, errno.EINVAL), (446, errno.EPERM)]
)
def test_without_landlock(call, code):
    done = without({call: code}, CHOOSE)
    assert done.stdout.startswith("ns pass fail"), done
    done = without({call: code} | DOCKER, CHOOSE)
    assert done.stdout.startswith("refused") and "--unsafe-sandbox" in done.stdout and "landlock" in done.stdout, done
    assert errno.errorcode[code] in done.stdout and "EPERM" in done.stdout and "unshare" in done.stdout, done


def test_without_seccomp():
    done = without({"seccomp": errno.EINVAL}, CHOOSE)
    assert done.stdout.startswith("refused") and done.stdout.count("PR_SET_SECCOMP") == 2 and "EINVAL" in done.stdout, (
        done
    )


def test_unsafe_only_when_asked():
    gone = DOCKER | {444: errno.ENOSYS}
    done = without(gone, CHOOSE.replace("workers=1", "workers=1, unsafe=True"))
    assert done.stdout.startswith("unsafe pass fail") and "landlock" in done.stdout, done
    with Sandbox(workers=1, unsafe=True) as own:
        assert own.tier in ("ns", "landlock")  # a tier that works is used
    with pytest.raises(ValueError, match="tier"):
        Sandbox(tier="unsafe")
    with Sandbox(workers=1, tier="unsafe", unsafe=True) as own:
        assert own.judge(ADD, SUM).tier == "unsafe" and own.judge(ADD, SUM_MODULE).passed
        assert (
            own.judge("def f():\n    while True: pass", [([], 1)], limits=Limits(cpu_s=0.5, wall_s=1)).status
            == "timeout"
        )


def test_a_probe_that_gets_out_is_refused(monkeypatch):
    monkeypatch.setattr(
        sandbox, "PROBE", sandbox.PROBE.replace("def read_canary(): open(canary).read()", "def read_canary(): pass")
    )
    with pytest.raises(SandboxUnavailable, match="self-test: read_canary"):
        Sandbox(workers=1)
    monkeypatch.setattr(sandbox, "PROBE", "import os; os._exit(0)")
    with pytest.raises(SandboxUnavailable, match="no answer"):
        Sandbox(workers=1)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="darwin.*--unsafe-sandbox"):
        Sandbox()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("tier", ["ns", "landlock"])
def test_as_an_ordinary_user(tier, tmp_path_factory):
    python = next((p for p in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3") if runs_as_user(p)), None)
    if python is None:
        pytest.skip("needs root")  # and a Python that others may read
    source = (ROOT / "sandbox.py").read_text()
    done = subprocess.run(
        [
            python,
            "-c",
            textwrap.dedent(f"""
    import sys, os, types, tempfile
    folder = tempfile.mkdtemp()
    open(folder + "/sandbox.py", "w").write({source!r})
    sys.path.insert(0, folder)
    from sandbox import *
    with Sandbox(workers=1, tier={tier!r}) as box:
        print(os.getuid(), box.judge({ADD!r}, {SUM!r}).status, box.judge({ADD!r}, {SUM_MODULE!r}).status)
        for body in ("open(os.environ.get('X', {str(ROOT / "sandbox.py")!r}))", "os.fork()", "__import__('socket').socket()", "os.kill(os.getppid(), 0)", "open('/etc/passwd')"):
            print(box.judge("import os\\ndef f():\\n    try: " + body + "\\n    except OSError: return 'held'\\n", [([], "held")]).status)
        print(box.judge("def f():\\n    while True: pass", [([], 1)], limits=Limits(cpu_s=0.5, wall_s=20)).status)
    import shutil; shutil.rmtree(folder)
    """),
        ],
        capture_output=True,
        text=True,
        user=65530,
        group=65530,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        timeout=60,
    )
    assert done.stdout.split() == ["65530", "pass", "pass", *["pass"] * 5, "timeout"], done


def runs_as_user(python):
    try:
        return (
            subprocess.run(
                [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
                user=65530,
                group=65530,
                extra_groups=[],
                cwd="/",
                env={},
                capture_output=True,
            ).returncode
            == 0
        )
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def test_command_line(tmp_path):
    def run(*args):
        done = subprocess.run(
            [sys.executable, str(ROOT / "sandbox.py"), *map(str, args)], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    program, tests, table = tmp_path / "adder.py", tmp_path / "adder_test.py", tmp_path / "tests.json"
    program.write_text(ADD)
    tests.write_text(SUM_MODULE)
    table.write_text("[[[1, 2], 3], [[5, 7], 13]]")
    code, text = run(program, "--tests", tests)
    assert code == 0 and text.startswith("pass (2 of 2 tests")
    code, text = run(program, "--tests", table, "--entry", "add")
    assert code == 1 and "fail (1 of 2" in text and "got 12, want 13" in text
    table.write_text("[[1, 2]")
    for args, words in [
        ((program,), "--tests"),
        ((program, "--tests", tmp_path / "no.py"), "no.py"),
        ((program, "--tests", table), "tests.json"),
        ((program, "--tests", program), "module"),
        (("--tier", "x"), "--tier"),
        (("--ent", "x"), "--ent"),
    ]:
        code, text = run(*args)
        assert code == 2 and words in text, (args, text)


# ---------------------------------------------------------------------------------------------------------------------
# Rates and endurance


def test_rate_against_a_fresh_interpreter():
    """Guards against a slip: tests share the cores. `bench.py sandbox` measures on a quiet machine, where 6 and 12 hold."""
    goals, best = {"ns": 3, "landlock": 3}, {"ns": 0, "landlock": 0}
    with Sandbox(workers=2, tier="ns") as ns, Sandbox(workers=2, tier="landlock") as landlock:
        for _ in range(8):  # short and side by side: the machine has other work
            fresh = sandbox.fresh_rate(seconds=0.6)
            for own in (ns, landlock):
                best[own.tier] = max(best[own.tier], sandbox.rate(own, 0.6) / fresh)
            if all(best[t] >= goals[t] for t in goals):
                break
    assert all(best[t] >= goals[t] for t in goals), best


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT.parent / "shared" / "data" / "exercism").is_dir(), reason="needs ../shared/data")
def test_rate_of_whole_exercism_suites(box):
    rows = [
        json.loads(line)
        for line in (ROOT.parent / "shared" / "data" / "exercism" / "practice.jsonl").read_text().splitlines()
    ]
    jobs = []
    for row in rows:
        (name,) = [n for n in row["test_files"] if n.endswith("_test.py")]
        helpers = {n: text for n, text in row["test_files"].items() if n != name}
        jobs.append(
            dict(code="\n".join(row["reference_files"].values()), tests=row["test_files"][name], helpers=helpers)
        )
    fresh = sandbox.fresh_rate(seconds=1)
    started = time.monotonic()
    results = box.judge_many(jobs)
    rate = len(jobs) / (time.monotonic() - started)
    fresh = min(fresh, sandbox.fresh_rate(seconds=1))
    assert sum(r.passed for r in results) >= 134
    assert rate >= min(5, 0.2 * fresh), (rate, fresh)  # tests share the cores; a quiet machine does over 15 a second


@pytest.mark.slow
def test_soak():
    """20,000 programs, at most 150 s: as many processes, descriptors and mounts at the end, and flat memory."""

    def memory(pid):
        return sum(
            int(line.split()[1])
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        )

    before = sockets_and_processes()
    jobs = [
        dict(code=ADD, tests=SUM),
        dict(code="def f():\n    return 'x' * 1000", tests=[([], "x" * 1000)]),
        dict(code="def f(:", tests=SUM),
        dict(code="import os; os._exit(1)", tests=SUM),
        dict(code="print('x' * 3000)\ndef f(): return 1", tests=[([], 2)]),
    ]
    want = ["pass", "pass", "error", "error", "fail"]
    started, done, marks = time.monotonic(), 0, []
    with Sandbox(workers=2) as own:
        own.judge_many(jobs * 20)
        inside = sockets_and_processes()
        while done < 20_000 and time.monotonic() - started < 150:
            results = own.judge_many(jobs * 100)
            assert [r.status for r in results] == want * 100
            done += len(results)
            marks.append(memory(os.getpid()))
        assert own.faults == 0 and sockets_and_processes() == inside
    assert sockets_and_processes() == before
    assert done >= 5_000, done
    assert marks[-1] < marks[len(marks) // 4] * 1.1 + 2048, marks
