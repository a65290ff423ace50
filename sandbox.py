"""
Runs programs that a model wrote, and says whether they are right. Knows nothing of tasks.

Three kinds of process:
  parent     this process. It owns the tests and the expected values.
  server     one per worker, exec'ed fresh. It forks, waits, kills, counts time, and sees nothing else: sources,
             arguments, results and tests travel on sockets that go straight from the parent to the forked process. What
             a server never held, none of its later forks can find in its memory.
  candidate  a fork of the server: one program, then dead. It may not fork, exec or open a socket, so it is exactly one
             process, rlimits are complete accounting and one SIGKILL is complete cleanup.

Two verdicts:
  function tasks    send inputs, receive plain data, compare in the parent with values that the parent built itself.
  unittest modules  the tests run in a second process, isolated alike, with proxies to the candidate over a data-only
                    link.
Standard output, exit codes and the candidate's own `==` are never a verdict.

Two tiers, each proven on every server by a probe that must fail at everything:
  ns        user, mount, net, ipc, uts and pid namespaces, seccomp, rlimits; a read-only root with the standard library
            and the system's shared libraries only
  landlock  Landlock, seccomp, rlimits; for containers and systems that refuse user namespaces. No file can be written.
            Known gap: `stat` of host paths and the names in a Python's site-packages stay visible.
Neither there: SandboxUnavailable, unless the caller asks for unsafe=True (rlimits only).

What is left: a kernel bug; timing; class-based tests that compare two candidate objects trust the candidate's `==`, and
a test that hands the wanted value to a method of a returned object trusts that method (plain=True refuses such).

    with Sandbox(workers=2) as box:
        box.judge("def add(a, b): return a + b", [([1, 2], 3)]).passed

    python sandbox.py                                  prints the tier, what it holds, and programs per second
    python sandbox.py FILE --tests FILE [--entry NAME] judges one file: exit 0 pass, 1 not, 2 bad input
"""
import _sitebuiltins
import ast
import atexit
import builtins
import contextlib
import ctypes
import datetime
import decimal
import errno
import fractions
import gc
import json
import linecache
import math
import operator
import os
import platform
import queue
import random
import re
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
import threading
import time
import traceback
import types
import unittest
from collections import Counter
from dataclasses import dataclass

MAX_DEPTH, MAX_NODES, MAX_BITS = 64, 100_000, 400_000  # of a value that comes from a candidate
MAX_TRUSTED = 20_000_000                               # nodes of a value that comes from the tests
RECYCLE = 2000                                         # programs after which a server is replaced
GRACE_S = 2.0                                          # the parent waits this long past the latest end, then kills


class SandboxUnavailable(RuntimeError):
    """No tier works here, or a server died twice over one program. Names the step and the errno."""


@dataclass(frozen=True)
class Limits:
    """
    Limits of one program. wall_s > cpu_s, and time in which it stood in line for a CPU does not count (up to wall_s
    more), so that a loaded machine does not turn into failed programs.
    """
    wall_s: float = 3.0
    cpu_s: float = 2.0
    memory_mb: int = 512    # address space
    threads: int = 16       # beside the main one
    nofile: int = 64
    fsize_mb: int = 16
    scratch_mb: int = 16    # ns tier: /tmp, the only place that can be written
    inodes: int = 512
    output_kb: int = 64     # stdout and stderr together
    result_kb: int = 1024   # results of a function task; one message of a unittest module
    source_kb: int = 64

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, (int, float)) or not 0 < value < 1e6:
                raise ValueError(f"limit {name} is {value!r}, want a number above 0 and below 1e6")

    @classmethod
    def modules(cls, **changes):
        """Defaults for unittest modules: many calls, each a round trip."""
        return cls(**{"wall_s": 10.0, "cpu_s": 5.0, **changes})


@dataclass(frozen=True)
class Result:
    """
    status   pass, fail (a wrong answer), error (raised, crashed, did not load), timeout, memory, output (too much of
             it), protocol (missing, extra or malformed results)
    message  at most 500 characters. Without detail=True it names test and kind of failure and holds no input and no
             expected value, so a model may see it. `output` is what the candidate printed, and may hold inputs.
    """
    status: str
    per_test: tuple = ()
    message: str = ""
    output: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_mb: float = 0.0
    tier: str = ""

    @property
    def passed(self):
        return self.status == "pass"


@dataclass(frozen=True)
class Raises:
    """Expected value: the call raises this exception or a subclass of it, with this text if one is given."""
    name: str
    text: str = None


@dataclass(frozen=True)
class Approx:
    """Expected value: a number with abs(got - value) <= tol. May stand inside a list, tuple or dict value."""
    value: float
    tol: float


# ---------------------------------------------------------------------------------------------------------------------
# Values as tagged JSON. Exact built-in types only; the reader builds every value itself. No pickle, no eval, no repr.

class Opaque:
    """Stands for an object that is not plain data. Equal to nothing."""
    __hash__ = object.__hash__

    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return False


# tag: (type, its parts). The parts are plain integers, a float pair or text; the type builds itself from them.
PARTS = {
    "dt": (datetime.datetime, lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond]),
    "da": (datetime.date, lambda v: [v.year, v.month, v.day]),
    "ti": (datetime.time, lambda v: [v.hour, v.minute, v.second, v.microsecond]),
    "td": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
    "r": (range, lambda v: [v.start, v.stop, v.step]),
    "fr": (fractions.Fraction, lambda v: [v.numerator, v.denominator]),
    "c": (complex, lambda v: [v.real, v.imag]),
    "de": (decimal.Decimal, lambda v: [str(v)])}
TAG_OF = {kind: tag for tag, (kind, _) in PARTS.items()}
# tag: (base type, its own iterator, the type that reads it back): a subclass cannot choose what it shows
SEQUENCES = {"t": (tuple, tuple.__iter__), "s": (set, set.__iter__), "fs": (frozenset, frozenset.__iter__)}


def encode(value, hook=None, nodes=MAX_NODES):
    """
    Plain data to a JSON-able tree. Subclasses of built-in types are brought down by the base type's own methods.
    hook(value) encodes the rest; without one it is a TypeError. ValueError: too deep, too many nodes, too large.
    """
    left = nodes

    def walk(v, depth):
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"value has more than {nodes} nodes, or is nested deeper than {MAX_DEPTH}")
        kind = type(v)  # not isinstance: an object may lie about its __class__
        if v is None or kind is bool:
            return v
        if issubclass(kind, str):
            return str.__str__(v)
        if issubclass(kind, int):
            v = int.__pos__(v)
            if v.bit_length() > MAX_BITS:
                raise ValueError("integer is too large")
            return v if v.bit_length() < 64 else {"i": hex(v)}
        if issubclass(kind, float):
            return float.__pos__(v)  # json keeps inf, nan and every bit of a float
        if issubclass(kind, list):
            return [walk(x, depth + 1) for x in list.__iter__(v)]
        if issubclass(kind, dict):
            return {"d": [[walk(k, depth + 1), walk(x, depth + 1)] for k, x in dict.items(v)]}
        for tag, (base, each) in SEQUENCES.items():
            if issubclass(kind, base):
                return {tag: [walk(x, depth + 1) for x in each(v)]}
        for base in (bytes, bytearray):
            if issubclass(kind, base):
                return {"b" if base is bytes else "ba": base.hex(v)}
        if kind in TAG_OF and getattr(v, "tzinfo", None) is None:
            return {TAG_OF[kind]: [walk(x, depth + 1) for x in PARTS[TAG_OF[kind]][1](v)]}
        if hook is None:
            raise TypeError(f"{kind.__name__} is not plain data")
        return hook(v)

    return walk(value, 0)


def _short_int(text):
    if len(text) > 20:
        raise ValueError("integer literal is too long")
    return int(text)


JSON = json.JSONDecoder(parse_int=_short_int)


def read_json(data):
    """Bytes to a JSON tree. ValueError for whatever is wrong with them."""
    try:
        return JSON.decode(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None


def _exact(kind, values):
    if type(values) is not list or any(type(v) is not kind for v in values):
        raise ValueError("malformed value")
    return values


def _hashable(keys):
    # A set of 50,000 integers with one hash takes minutes to build: count the hashes first.
    if keys and max(Counter(map(hash, keys)).values()) > 64:
        raise ValueError("too many keys with one hash")
    return keys


def decode(tree, hook=None, nodes=MAX_NODES):
    """The inverse of encode, strict: ValueError for anything that encode would not have written."""
    left = nodes

    def walk(v, depth):
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH + 1:
            raise ValueError("value is too large or too deep")
        kind = type(v)
        if v is None or kind in (bool, int, float, str):
            return v
        if kind is list:
            return [walk(x, depth + 1) for x in v]
        if kind is not dict or not v:
            raise ValueError("malformed value")
        tag = next(iter(v))
        body = v[tag]
        if hook and tag in ("p", "e", "f"):
            return hook(v)
        if len(v) != 1:
            raise ValueError("malformed value")
        if tag in ("i", "b", "ba", "o"):
            _exact(str, [body])
            if tag == "i" and len(body) > MAX_BITS // 4 + 3:
                raise ValueError("integer is too large")
            read = {"i": lambda text: int(text, 16), "b": bytes.fromhex, "ba": bytearray.fromhex, "o": Opaque}[tag]
            return read(body)
        if type(body) is not list:
            raise ValueError("malformed value")
        if tag == "d":
            pairs = [(walk(k, depth + 1), walk(x, depth + 1)) for k, x in body]
            _hashable([k for k, _ in pairs])
            return dict(pairs)
        parts = [walk(x, depth + 1) for x in body]
        if tag in SEQUENCES:
            return SEQUENCES[tag][0](parts if tag == "t" else _hashable(parts))
        if tag in PARTS:
            # A Fraction's gcd is quadratic, and so is text to Decimal.
            if tag in ("fr", "de") and any(len(str(x)) > 4000 for x in parts):
                raise ValueError("number is too long")
            _exact({"c": float, "de": str}.get(tag, int), parts)
            return PARTS[tag][0](*parts)
        raise ValueError("unknown tag")

    try:
        return walk(tree, 0)
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"malformed value: {error}"[:200]) from None


def same(got, want):
    """
    The comparison that a verdict rests on. Both sides are built-in types made in this process, so `==` means what it
    says: 2 == 2.0 and True == 1 as in the tests that tasks come with. NaN equals NaN only where NaN is expected.
    """
    if isinstance(want, Approx):
        # Written so that NaN fails; infinities are equal to themselves only.
        return type(got) in (int, float, bool, decimal.Decimal, fractions.Fraction) and bool(
            got == want.value or abs(float(got) - want.value) <= want.tol)
    if type(got) is Opaque:
        return False
    if isinstance(want, float) and want != want:
        return type(got) is float and got != got
    if isinstance(want, (list, tuple)) and type(got) in (list, tuple):
        return isinstance(want, type(got)) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, dict) and type(got) is dict:
        return len(got) == len(want) and all(k in got and same(got[k], v) for k, v in want.items())
    return bool(got == want)


# ---------------------------------------------------------------------------------------------------------------------
# Frames: 4 bytes of length, then JSON

def send_frame(sock, message):
    data = json.dumps(message).encode()
    sock.sendall(struct.pack(">I", len(data)) + data)


def recv_frame(sock, cap):
    """One message. EOFError when the peer is gone, ValueError above cap bytes or if it is not JSON."""
    def exactly(n):
        parts = []
        while n:
            part = sock.recv(min(n, 1 << 20))
            if not part:
                raise EOFError("the other process is gone")
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    size, = struct.unpack(">I", exactly(4))
    if size > cap:
        raise ValueError(f"message of {size} bytes, at most {cap}")
    return read_json(exactly(size))


# ---------------------------------------------------------------------------------------------------------------------
# The kernel's side: system calls, namespaces, Landlock, seccomp

libc = ctypes.CDLL(None, use_errno=True)
# fork(2) with the interpreter's lock held, past os.fork: its hooks (locks of threads that a server does not have, a new
# seed) cost 100 page faults in every child, a tenth of its time.
fork = ctypes.PyDLL(None).fork
CLONE = dict(ns=0x20000, uts=0x4000000, ipc=0x8000000, user=0x10000000, pid=0x20000000, net=0x40000000)
RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
SPARE_UID = 65521  # systemd's list of ids keeps 65520 to 65533 unused; within the 65536 ids of most containers

# name: (x86_64, aarch64). Refused with EPERM, an exception in honest code.
DENIED = dict(
    fork=(57, -1), vfork=(58, -1), execve=(59, 221), execveat=(322, 281), ptrace=(101, 117), kcmp=(312, 272),
    process_vm_readv=(310, 270), process_vm_writev=(311, 271), get_robust_list=(274, 100),
    # socketpair stays, for asyncio: the others would reach a host's named sockets from one of its ends
    socket=(41, 198), connect=(42, 203), bind=(49, 200), listen=(50, 201), accept=(43, 202), accept4=(288, 242),
    mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41), chroot=(161, 51), unshare=(272, 97), setns=(308, 268),
    bpf=(321, 280), seccomp=(317, 277), perf_event_open=(298, 241), userfaultfd=(323, 282), vmsplice=(278, 75),
    io_setup=(206, 0), add_key=(248, 217), request_key=(249, 218), keyctl=(250, 219), personality=(135, 92),
    name_to_handle_at=(303, 264), open_by_handle_at=(304, 265), memfd_create=(319, 279),
    shmget=(29, 194), shmat=(30, 196), shmctl=(31, 195), shmdt=(67, 197), msgget=(68, 186), msgsnd=(69, 189),
    msgrcv=(70, 188), msgctl=(71, 187), semget=(64, 190), semop=(65, 193), semctl=(66, 191), semtimedop=(220, 192),
    mq_open=(240, 180), mq_unlink=(241, 181), mq_notify=(244, 184),
    # metadata, which Landlock does not cover
    chmod=(90, -1), fchmod=(91, 52), fchmodat=(268, 53), fchmodat2=(452, 452), chown=(92, -1), fchown=(93, 55),
    lchown=(94, -1), fchownat=(260, 54), utime=(132, -1), utimes=(235, -1), futimesat=(261, -1), utimensat=(280, 88),
    setxattr=(188, 5), lsetxattr=(189, 6), fsetxattr=(190, 7), getxattr=(191, 8), lgetxattr=(192, 9),
    fgetxattr=(193, 10), listxattr=(194, 11), llistxattr=(195, 12), flistxattr=(196, 13), removexattr=(197, 14),
    lremovexattr=(198, 15), fremovexattr=(199, 16),
    inotify_init=(253, -1), inotify_init1=(294, 26), inotify_add_watch=(254, 27),
    fanotify_init=(300, 262), fanotify_mark=(301, 263),
    # other processes
    tkill=(200, 130), rt_sigqueueinfo=(129, 138), rt_tgsigqueueinfo=(297, 240), sched_setaffinity=(203, 122),
    sched_setscheduler=(144, 119), sched_setparam=(142, 118), sched_setattr=(314, 274), setpriority=(141, 140),
    ioprio_set=(251, 30), move_pages=(279, 239), migrate_pages=(256, 238),
    # the machine
    sync=(162, 81), syncfs=(306, 267),
    swapon=(167, 224), swapoff=(168, 225), reboot=(169, 142), kexec_load=(246, 104), kexec_file_load=(320, 294),
    init_module=(175, 105), finit_module=(313, 273), delete_module=(176, 106), acct=(163, 89), quotactl=(179, 60),
    syslog=(103, 116), settimeofday=(164, 170), clock_settime=(227, 112), clock_adjtime=(305, 266), adjtimex=(159, 171),
    sethostname=(170, 161), setdomainname=(171, 162), vhangup=(153, 58), iopl=(172, -1), ioperm=(173, -1),
    modify_ldt=(154, -1), uselib=(134, -1), lookup_dcookie=(212, 18))
# in the landlock tier, where the host's links could be read; without them realpath() of a linked path is an error
LINKS = dict(readlink=(89, -1), readlinkat=(267, 78))
# machine: (column of the table, AUDIT_ARCH, highest number of the first table, rseq)
ARCHES = {"x86_64": (0, 0xC000003E, 334, 334), "aarch64": (1, 0xC00000B7, 293, 293)}
NEWER = (436, 439, 449)  # close_range, faccessat2, futex_waitv; other new calls are ENOSYS (io_uring, clone3, pidfd_*)
CALLS = dict(clone=(56, 220), socketpair=(53, 199), kill=(62, 129), tgkill=(234, 131), prlimit64=(302, 261),
             prctl=(157, 167), fcntl=(72, 25), ioctl=(16, 29), pivot_root=(155, 41))
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, MOUNT_SETATTR = 444, 445, 446, 442  # one number on every machine


def call(step, number, *args):
    """A raw system call. OSError with the name of the step."""
    args = [a if isinstance(a, (bytes, type(None), ctypes.Array)) else ctypes.c_long(a) for a in args]
    result = libc.syscall(ctypes.c_long(number), *args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), step)
    return result


def words(*args):
    return [ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]


def libcall(step, function, *args):
    """A call of libc that returns -1 on failure. OSError with the name of the step."""
    return attempt(step, function, words(*args))


def attempt(step, function, args):
    """libcall with words() made before: new objects touch pages, and copied pages are most of what a fork costs."""
    result = function(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), step)
    return result


def unshare(*names):
    libcall(f"unshare({'+'.join(names)})", libc.unshare, sum(CLONE[n] for n in names))


def mount(source, target, kind, flags, data=""):
    libcall(f"mount({kind or source} on {target})", libc.mount, source.encode(), target.encode(), kind.encode(), flags,
            data.encode())


def read_only(path, flags):
    # mount_setattr adds flags and keeps locked ones, which a remount from a user namespace would have to repeat.
    attr = struct.pack("QQQQ", flags, 0, 0, 0)
    call(f"mount_setattr({path})", MOUNT_SETATTR, -100, path.encode(), 0x8000, attr, len(attr))


def map_ids(proc, uid, gid):
    """One id, mapped to itself. proc: a descriptor of /proc, since the tree that candidates see has none."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(fd, text.encode())
        os.close(fd)


def library_paths():
    """(folders that a candidate may read, folders below them that it may not)."""
    stdlib = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    system = {"/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"}
    shown = sorted(p for p in stdlib | system if os.path.isdir(p))
    real = [os.path.realpath(p) for p in shown]
    hidden = {os.path.join(p, d) for p in stdlib for d in ("site-packages", "dist-packages")} | {"/usr/lib/python3"}
    kept = [p for p in shown if os.path.islink(p) or not any(p != r and p.startswith(r + "/") for r in real)]
    return kept, sorted(p for p in hidden if os.path.isdir(p))


def build_root():
    """A new root: the library folders, read-only; /dev/null, zero and urandom; an empty /tmp to mount scratch on."""
    mount("none", "/", "", REC | PRIVATE)
    shown, hidden = library_paths()
    devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
    links = {p: os.readlink(p) for p in shown if os.path.islink(p)}
    # Descriptors first: the new root covers /tmp, and a Python may live there.
    fds = {p: os.open(p, os.O_PATH) for p in shown + devices if p not in links}
    base = "/tmp"
    mount("tmpfs", base, "tmpfs", NOSUID | NODEV, "size=1m,mode=0755")
    for path, fd in fds.items():
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if path in devices:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        else:
            os.makedirs(target, exist_ok=True)
        mount(f"/proc/self/fd/{fd}", target, "", BIND | REC)
        read_only(target, RDONLY | NOSUID | (NOEXEC if path in devices else NODEV))
        os.close(fd)
    for path, text in links.items():
        os.symlink(text, base + path)
    for path in hidden:
        if os.path.isdir(base + path):
            mount("tmpfs", base + path, "tmpfs", RDONLY | NOSUID | NODEV, "size=4k")
    os.makedirs(base + "/tmp", exist_ok=True)
    os.chdir(base)
    call("pivot_root", CALLS["pivot_root"][ARCHES[platform.machine()][0]], b".", b".")
    libcall("umount2", libc.umount2, b".", 2)  # the old root lies under the new one; 2 is MNT_DETACH
    os.chdir("/")
    # The root mount alone: remounted binds and devices have their own flags.
    call("mount_setattr(/)", MOUNT_SETATTR, -100, b"/", 0, struct.pack("QQQQ", RDONLY, 0, 0, 0), 32)


def landlock_rules():
    """A ruleset descriptor: read and list the library folders, nothing else; no signal or abstract socket outside."""
    abi = call("landlock_create_ruleset", LANDLOCK_CREATE, None, 0, 1)
    if abi < 3:
        raise OSError(errno.EOPNOTSUPP, f"Landlock ABI {abi}, at least 3 is needed", "landlock_create_ruleset")
    # 13 rights in ABI 1, then refer (2), truncate (3), device ioctl (5); ABI 4 has TCP; ABI 6 has scopes
    files = (1 << (13 + 2 + (abi >= 5))) - 1
    attr = struct.pack("QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    rules = call("landlock_create_ruleset", LANDLOCK_CREATE, attr, len(attr), 0)
    read, listing, write = 4, 8, 2
    shown, hidden = library_paths()
    grants = [(p, read | listing) for p in shown]
    grants += [("/dev/null", read | write), ("/dev/zero", read), ("/dev/urandom", read)]
    while any(h == p or h.startswith(p + "/") for p, rights in grants if rights & read for h in hidden):
        # Landlock cannot take a folder out of an allowed one: allow its neighbours, and the listing of the parent.
        new = []
        for path, rights in grants:
            if not rights & read or not any(h == path or h.startswith(path + "/") for h in hidden):
                new.append((path, rights))
            elif path not in hidden:
                new += [(path, listing)] + [(os.path.join(path, name), read | listing) for name in os.listdir(path)]
        grants = new
    for path, rights in grants:
        if os.path.islink(path) and os.path.dirname(path) not in ("/", "/usr"):
            continue  # a link in a library folder may lead anywhere
        fd = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            rights &= ~listing
        call(f"landlock_add_rule({path})", LANDLOCK_ADD, rules, 1, struct.pack("=QI", rights, fd), 0)
        os.close(fd)
    return rules


PID = 0x7FFFFFF1  # stands for the candidate's own id in its seccomp program


def bpf(pid=PID, links=False):
    """The seccomp program of a candidate: bytes of struct sock_filter. links: whether it may read symbolic links."""
    column, arch, last, rseq = ARCHES[platform.machine()]
    load, jump, equal, at_least, any_bit, ret = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
    actions = (0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000)
    allow, eperm, enosys, kill = [(ret, 0, 0, action) for action in actions]

    def argument(index, values, inside, outside):
        # by whether the low word of the argument is one of values
        tests = [step for v in values for step in ((equal, 0, 1, v), inside)]
        return [(load, 0, 0, 16 + 8 * index)] + tests + [outside]

    denied = [*DENIED.values(), *(LINKS.values() if not links else ())]
    blocks = {numbers[column]: [eperm] for numbers in denied if numbers[column] >= 0}
    blocks |= {number: [allow] for number in (*NEWER, rseq)}
    special = {
        # threads only, and no namespace
        "clone": [(load, 0, 0, 16), (any_bit, 0, 2, 0x10000), (any_bit, 1, 0, sum(CLONE.values()) | 0x2000000), allow,
                  eperm, eperm],
        "kill": argument(0, (pid,), allow, eperm),
        "tgkill": argument(0, (pid,), allow, eperm),
        "prlimit64": argument(0, (pid, 0), allow, eperm),
        # AF_UNIX: others make the kernel load modules. Streams: a datagram end could send to any socket on the host.
        "socketpair": [(load, 0, 0, 16), (equal, 1, 0, 1), eperm]
        + argument(1, (1, 1 | 0x800, 1 | 0x80000, 1 | 0x80800), allow, eperm),
        # get or set the name, name memory, read dumpable and capabilities. Not the parent-death signal.
        "prctl": argument(0, (15, 16, 0x53564D41, 3, 23, 39), allow, eperm),
        # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY and their ioctls signal others; TIOCSTI types on a tty
        "fcntl": argument(1, (8, 10, 15, 1024, 1026), eperm, allow),
        "ioctl": argument(1, (0x8901, 0x8902, 0x5452, 0x5412, 0x541C), eperm, allow)}
    blocks |= {CALLS[name][column]: block for name, block in special.items()}
    # Intervals of call numbers with one answer, then a binary search over them. The kernel compiles the program, and
    # walks it once for every number that there is, each time that a candidate installs it: so a short one.
    starts = []
    for number in sorted({0, last + 1, *blocks, *(n + 1 for n in blocks)}):
        block = blocks.get(number, [allow if number <= last else enosys])
        if not starts or starts[-1][1] != block:
            starts.append((number, block))
    if arch == 0xC000003E:
        starts.append((0x40000000, [kill]))  # x32 numbers

    def search(table):
        if len(table) == 1:
            return table[0][1]
        middle = table[len(table) // 2][0]
        low, high = search(table[:len(table) // 2]), search(table[len(table) // 2:])
        if len(low) < 256:  # as far as a conditional jump reaches
            return [(at_least, len(low), 0, middle)] + low + high
        return [(at_least, 0, 1, middle), (jump, 0, 0, len(low))] + low + high

    program = [(load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0)] + search(starts)
    return b"".join(struct.pack("HBBI", *step) for step in program)


class Filter:
    """A seccomp program, made once. install() puts it on the calling process, which needs no_new_privs, for good."""

    def __init__(self, program):
        self.steps = ctypes.create_string_buffer(program, len(program))
        self.args = words(22, 2, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self.steps)), 0, 0)
        self.places = [i for i in range(4, len(program), 8) if program[i:i + 4] == struct.pack("I", PID)]

    def install(self):
        for place in self.places:
            struct.pack_into("I", self.steps, place, os.getpid())
        attempt("prctl(PR_SET_SECCOMP)", libc.prctl, self.args)


def become_spare():
    os.setgroups([])
    os.setresgid(SPARE_UID, SPARE_UID, SPARE_UID)
    os.setresuid(SPARE_UID, SPARE_UID, SPARE_UID)


RLIMITS = {name: getattr(resource, f"RLIMIT_{name}") for name in (
    "AS CPU CORE FSIZE NOFILE MEMLOCK MSGQUEUE SIGPENDING NPROC".split()) if hasattr(resource, f"RLIMIT_{name}")}


def drop_capabilities():
    # The bounding set needs no care: it counts at exec only, which is refused.
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    libcall("capset", libc.capset, header, none)


# ---------------------------------------------------------------------------------------------------------------------
# Between tests and candidate: a data-only link. What is not data stays where it is and is spoken of by number.

class LinkBroken(BaseException):
    """The other end is gone or breaks the protocol. Not an Exception: a test that expects one must not get this."""


class Link:
    """One end. `ask` sends a request and answers the other end's requests until its own reply arrives."""

    def __init__(self, sock, cap, nodes):
        self.sock, self.cap, self.nodes = sock, cap, nodes  # the last two bound what comes in

    def ask(self, verb, *values):
        send_frame(self.sock, [verb, encode(list(values), self.refer, MAX_TRUSTED)])
        while True:
            try:
                verb, body = recv_frame(self.sock, self.cap)
                if verb == "v":
                    return decode(body, self.resolve, self.nodes)
                error = self.rebuild(body) if verb == "x" else None
            except (EOFError, OSError, ValueError, TypeError, KeyError, IndexError) as problem:
                raise LinkBroken(f"{type(problem).__name__}: {problem}") from None
            if error is not None:
                raise error
            self.answer([verb, body])

    def answer(self, message):
        try:
            values = decode(message[1], self.resolve, self.nodes)
            if type(values) is not list:
                raise ValueError("malformed request")
            reply = ["v", encode(self.perform(message[0], values), self.refer, MAX_NODES)]
        except LinkBroken:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the other end gets a RuntimeError
            reply = ["x", self.describe(error)]
        send_frame(self.sock, reply)

    def describe(self, error):
        if not isinstance(error, Exception):
            error = RuntimeError(f"raised {type(error).__name__}")
        text = text_of(error)
        try:
            args = encode(error.args, self.refer, 1000)
        except (TypeError, ValueError):
            args = {"t": [text]}
        return [self.refer(type(error)), args, text]


class Refused(BaseException):
    """In the tests: the judge itself says no. Outside Exception, so that it satisfies no assertRaises of a test."""


class Callback:
    """In the candidate: a function of the tests."""

    def __init__(self, link, number):
        self.link, self.number = link, number

    def __call__(self, *args, **kwargs):
        return self.link.ask("call", self.number, args, kwargs)


class CandidateLink(Link):
    """The candidate's end: holds its objects, does what the tests ask."""

    def __init__(self, sock, cap, module, problem):
        super().__init__(sock, cap, MAX_TRUSTED)
        self.module, self.problem, self.objects, self.numbers = module, problem, [], {}

    def refer(self, value):
        if type(value) is Callback:
            return {"f": value.number}
        if isinstance(value, type) and issubclass(value, Exception):
            # own classes as [number, name], then the built-in one they rest on
            chain = []
            for kind in value.__mro__:
                if getattr(builtins, kind.__name__, None) is kind:
                    return {"e": chain + [kind.__name__]}
                chain.append([self.number(kind), kind.__name__])
        return {"p": self.number(value), "k": callable(value)}

    def number(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # held, so that the id stays its own
        return self.numbers[id(value)]

    def resolve(self, tree):
        if "e" in tree:
            return getattr(builtins, tree["e"][-1])  # a built-in type as an argument
        return Callback(self, tree["f"]) if "f" in tree else self.objects[tree["p"]]

    def rebuild(self, body):
        kind = self.objects[body[0]["p"]] if "p" in body[0] else getattr(builtins, body[0]["e"][-1])
        return kind(*decode(body[1], self.resolve))

    def perform(self, verb, values):
        if verb == "module":
            if self.problem:
                raise self.problem
            return [self.module, [name for name in dir(self.module) if not name.startswith("_")]]
        if verb == "call":
            return values[0](*values[1], **values[2])
        if verb == "get":
            return getattr(*values)
        if verb == "enter":
            return type(values[0]).__enter__(values[0])
        if verb == "exit":
            error = getattr(builtins, values[1])(values[2]) if values[1] else None
            return type(values[0]).__exit__(values[0], type(error) if error else None, error, None)
        return (getattr(operator, verb, None) or getattr(builtins, verb))(*values)

    def serve(self):
        while True:
            self.answer(recv_frame(self.sock, 1 << 30))


class Proxy:
    """
    In the tests: an object of the candidate. Never equal to plain data; two are equal when the candidate says so.
    A test may compute with an object and plain data, but what comes of it (a "mixed" object) gives no number, truth or
    order: `abs(got - want) < 1e-6` must not be answered by the object itself.
    """
    __slots__ = ("_link", "_number", "_mixed")

    def __init__(self, link, number, mixed=False):
        for name, value in (("_link", link), ("_number", number), ("_mixed", mixed)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__doc__", "__qualname__", "__dict__"):
            raise AttributeError(name)
        return self._carry(self._link.ask("get", self, name))

    def _carry(self, value):
        """What comes of a mixed object is mixed, or refused."""
        if not self._mixed:
            return value
        if not isinstance(value, Proxy):
            raise Refused("an object that was computed with plain data has no value")
        return type(value)(value._link, value._number, True)

    def __setattr__(self, name, value):
        self._link.ask("setattr", self, name, value)

    def __delattr__(self, name):
        self._link.ask("delattr", self, name)

    def __eq__(self, other):
        return isinstance(other, Proxy) and self._link.ask("__eq__", self, other) is True

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self._link.ask("hash", self))

    def __contains__(self, item):
        if isinstance(item, Proxy):
            return self._link.ask("__contains__", self, item) is True
        return any(x == item for x in self)  # the candidate must not answer whether it holds what the test wants

    def __instancecheck__(self, value):
        return isinstance(value, Proxy) and self._link.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value):
        return isinstance(value, Proxy) and self._link.ask("issubclass", value, self) is True

    def __enter__(self):
        return self._carry(self._link.ask("enter", self))

    def __exit__(self, kind, error, trace):
        name = next((k.__name__ for k in kind.__mro__ if getattr(builtins, k.__name__, None) is k), "") if kind else ""
        # The text of a failed assertion holds what the test wants. And nothing is swallowed, whatever the candidate
        # says: its own error before an assertion, or the assertion's, would then be a pass.
        ours = kind is not None and (not issubclass(kind, Exception) or issubclass(kind, AssertionError))
        self._link.ask("exit", self, "RuntimeError" if ours else name, "" if ours or not kind else str(error))
        return False

    def __str__(self):
        return self._text("str")

    def __repr__(self):
        return self._text("repr")

    def __format__(self, spec):
        return self._text("format", spec)

    def _text(self, verb, *args):
        text = self._link.ask(verb, self, *args)
        if type(text) is not str:
            raise TypeError(f"{verb} gave no text")
        if self._mixed and re.fullmatch(r"[\s\d.,eEj()/+-]*", text):  # a difference that prints as 0
            raise Refused("an object that was computed with plain data has no number for a text")
        return text


class CallableProxy(Proxy):
    __slots__ = ()

    def __call__(self, *args, **kwargs):
        return self._carry(self._link.ask("call", self, list(args), kwargs))


def _arithmetic(name, verb, reflected):
    def method(self, other):
        mixed = self._mixed or not isinstance(other, Proxy) or other._mixed
        value = self._link.ask(verb, *((other, self) if reflected else (self, other)))
        # a power of an object may be a plain number; a difference might hide one, and so might a power of that
        if mixed and (verb != "__pow__" or self._mixed or isinstance(other, Proxy) and other._mixed):
            if not isinstance(value, Proxy):
                raise Refused("an object and plain data gave plain data")
            return type(value)(value._link, value._number, True)
        return value
    method.__name__ = name
    setattr(Proxy, name, method)


def _order(verb):
    def method(self, other):
        if not isinstance(other, Proxy) or self._mixed or other._mixed:
            raise Refused("an object cannot be ordered against plain data")
        return self._link.ask(verb, self, other) is True
    method.__name__ = verb
    setattr(Proxy, verb, method)


def _unary(name, verb):
    def method(self, *args):
        if self._mixed:
            raise Refused("an object that was computed with plain data has no value")
        return self._link.ask(verb, self, *args)
    method.__name__ = name
    setattr(Proxy, name, method)


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    _arithmetic(f"__{_name}__", f"__{_name}__", False)
    _arithmetic(f"__r{_name}__", f"__{_name}__", True)
for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    _order(_name)
for _name in ("len", "iter", "next", "bool", "int", "float", "complex", "round", "abs", "reversed", "dir"):
    _unary(f"__{_name}__", _name)
for _name in ("__neg__", "__pos__", "__invert__", "__index__", "__getitem__", "__setitem__", "__delitem__"):
    _unary(_name, _name)


class TestsLink(Link):
    """The tests' end: trusts nothing that comes in."""

    def __init__(self, sock, cap, plain):
        super().__init__(sock, cap, MAX_NODES)
        self.plain, self.memory, self.failed = plain, False, None
        self.proxies, self.classes, self.functions = {}, {}, []

    def ask(self, verb, *values):
        try:
            value = super().ask(verb, *values)
        except StopIteration as error:
            if verb != "next":  # it would end a map() or zip() of the test with nothing compared
                raise RuntimeError("raised StopIteration") from error
            raise
        failed, self.failed = self.failed, None
        if failed:  # an assertion inside a callback counts, even where the candidate caught it
            raise failed
        if self.plain and verb == "call" and isinstance(value, Proxy):
            raise Refused("returned an object, not plain data")
        return value

    def refer(self, value):
        if isinstance(value, Proxy):
            return {"p": value._number}
        if isinstance(value, type):
            number = next((n for n, kind in self.classes.items() if kind is value), None)
            if number is not None:
                return {"p": number}
            base = next((k for k in value.__mro__ if getattr(builtins, k.__name__, None) is k), None)
            if issubclass(value, Exception) or base is value:
                return {"e": [base.__name__]}
        if callable(value):
            self.functions.append(value)
            return {"f": len(self.functions) - 1}
        raise TypeError(f"{type(value).__name__} cannot be given to the candidate")

    def resolve(self, tree):
        if set(tree) == {"e"}:
            return self.exception_class(tree["e"])
        if set(tree) == {"f"}:
            return self.function(tree["f"])
        number, = _exact(int, [tree["p"]])
        if number not in self.proxies:
            self.proxies[number] = (CallableProxy if tree.get("k") is True else Proxy)(self, number)
        return self.proxies[number]

    def function(self, number):
        if type(number) is not int or not 0 <= number < len(self.functions):
            raise ValueError("malformed reference")
        return self.functions[number]

    def exception_class(self, chain):
        """
        A built-in exception, or a local class of the candidate's name on top of one. A name from the candidate never
        resolves to a class of unittest, and nothing outside Exception is raised here.
        """
        if type(chain) is not list or not chain or type(chain[-1]) is not str:
            raise ValueError("malformed exception")
        kind = getattr(builtins, chain[-1], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        for number, name in reversed(chain[:-1]):
            _exact(int, [number]), _exact(str, [name])
            if number not in self.classes:
                self.classes[number] = type(name, (kind,), {"__str__": lambda error: error.__dict__.get("text", "")})
            kind = self.classes[number]
        return kind

    def rebuild(self, body):
        if type(body) is not list or len(body) != 3 or type(body[0]) is not dict or set(body[0]) != {"e"}:
            raise ValueError("malformed exception")
        kind, args = self.exception_class(body[0]["e"]), decode(body[1], self.resolve, 1000)
        self.memory |= issubclass(kind, MemoryError)
        if type(args) is not tuple:
            raise ValueError("malformed exception")
        try:
            error = kind(*args)
        except TypeError:  # UnicodeDecodeError and the like want arguments of their own
            error = RuntimeError(f"{kind.__name__}: {body[2]}")
        error.text = body[2] if type(body[2]) is str else ""
        return error

    def perform(self, verb, values):
        if verb != "call" or len(values) != 3:
            raise ValueError("the candidate may only call functions that a test gave it")
        number, args, kwargs = values
        try:
            return self.function(number)(*args, **kwargs)
        except (AssertionError, Refused) as error:
            self.failed = error
            raise

    def describe(self, error):
        if isinstance(error, Exception):
            return [self.refer(type(error)), {"t": ["" if isinstance(error, AssertionError) else str(error)]}, ""]
        return super().describe(error)


# ---------------------------------------------------------------------------------------------------------------------
# Inside a forked process, after it was confined

def text_of(error):
    try:
        return str(error)[:2000]
    except BaseException:  # its own __str__ raised
        return ""


def names_of(error):
    return [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException)]


def load(source, name):
    """Executes a source as module `name`, which other modules may import."""
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    sys.modules[name] = module
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


def last_function(source):
    names = [node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not names:
        raise NameError("the program defines no function")
    return names[-1]


def call_role(channel, link, job):
    """A function task: one line of JSON for each call, in order."""
    def line(*message):
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        module = load(job["source"], "candidate")
        function = getattr(module, job["entry"] or last_function(job["source"]))
    except BaseException as error:  # whatever the program raises is a result
        line("load", names_of(error), text_of(error)[:200])
        return
    for args in job["calls"]:
        try:
            value = function(*decode(args, nodes=MAX_TRUSTED))
            message = ("v", encode(value, lambda v: {"o": type(v).__name__}))
        except BaseException as error:
            message = ("x", names_of(error), text_of(error)[:200])
        line(*message)


def serve_role(channel, link, job):
    """The candidate's side of a unittest module."""
    module = problem = None
    try:
        module = load(job["source"], job["module"])
    except BaseException as error:
        problem = error if isinstance(error, Exception) else RuntimeError(f"raised {type(error).__name__}")
    try:
        CandidateLink(link, 1 << 30, module, problem).serve()
    except (EOFError, LinkBroken):
        pass  # the tests are done


def tests_role(channel, link, job):
    """Hidden tests and unittest, no candidate code: a line of JSON for each test as it ends, then how many ran."""
    def line(*message):
        channel.sendall(json.dumps(message).encode() + b"\n")

    class Report(unittest.TestResult):
        def addSuccess(self, test):
            line(test.id(), True, "", "")

        def failed(self, test, error):
            what = "failed" if issubclass(error[0], AssertionError) else f"raised {error[0].__name__}"
            line(test.id(), False, what, "".join(traceback.format_exception_only(*error[:2]))[-1500:])

        addFailure = addError = failed

        def addSubTest(self, test, subtest, error):
            if error:
                self.failed(test, error)

        def addSkip(self, test, reason):  # neither this nor the next two is a pass
            line(test.id(), False, "was skipped", "")

        def addExpectedFailure(self, test, error):
            line(test.id(), False, "failed, as it expects", "")

        def addUnexpectedSuccess(self, test):
            line(test.id(), False, "passed where it expects to fail", "")

    def guarded(compare):
        def method(self, first, second, *args, **kwargs):
            if isinstance(first, Proxy) != isinstance(second, Proxy):  # or the candidate is handed the wanted number
                raise self.failureException("an object is not near plain data")
            return compare(self, first, second, *args, **kwargs)
        return method

    for name in ("assertAlmostEqual", "assertNotAlmostEqual"):
        setattr(unittest.TestCase, name, guarded(getattr(unittest.TestCase, name)))
    far = TestsLink(link, job["cap"], job["plain"])
    try:
        remote, names = far.ask("module")
        _exact(str, names)
    except Exception as error:
        line("load", names_of(error), str(error)[:200])
        return

    class RemoteModule(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return far.ask("get", remote, name)

        def __setattr__(self, name, value):
            far.ask("setattr", remote, name, value)

    module = RemoteModule(job["module"])
    sys.modules[job["module"]] = module
    try:
        # `import *` must not replace what the tests rest on: built-ins, modules, and the names of their other imports
        taken = {alias.asname or alias.name for node in ast.walk(ast.parse(job["tests"]))
                 if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", None) != job["module"]
                 for alias in node.names} | set(dir(builtins))
        module.__dict__["__all__"] = [name for name in names if name.isidentifier() and name not in taken]
        for name, source in job["helpers"].items():
            load(source, name.removesuffix(".py"))
        suite = unittest.defaultTestLoader.loadTestsFromModule(load(job["tests"], "hidden_tests"))
    except (Exception, Refused) as error:  # most often an ImportError: the candidate lacks a name
        line("load", names_of(error), str(error)[:200])
        return
    report = Report()
    suite.run(report)
    line("done", report.testsRun, far.memory)


def run_role(channel, link, job):
    """A program by itself, as `python FILE` would run it."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        load(job["source"], "__main__")
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        channel.sendall(b"exit\n")
        return 0 if code is None else code & 255 if isinstance(code, int) else 1
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        sys.stderr.write("".join(lines[:1] + [x for x in lines[1:] if "sandbox.py" not in x]))
        channel.sendall(json.dumps(["x", names_of(error)]).encode() + b"\n")
        return 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


ROLES = {"call": call_role, "serve": serve_role, "tests": tests_role, "run": run_role}


class End:
    """The end of a socket as a bare descriptor: less memory to touch in every fork than an object of socket's."""

    def __init__(self, fd):
        self.fd = fd

    def recv(self, n):
        return os.read(self.fd, n)

    def sendall(self, data):
        while data:
            data = data[os.write(self.fd, data):]


def forked_main():
    """Descriptors: 0 stdin, 1 and 2 output, 3 the channel to the parent, 4 the link of tests and candidate if any."""
    channel, link = End(3), End(4)
    job = recv_frame(channel, 1 << 30)
    code = ROLES[job["role"]](channel, link, job) or 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the program closed or replaced it
    return code


# ---------------------------------------------------------------------------------------------------------------------
# The server

class Server:
    """Forks one program at a time for the parent, at the other end of `control`. Sees limits and descriptors only."""

    def __init__(self, control, tier):
        self.control, self.tier = control, tier
        self.proc = self.pidns = self.rules = None
        self.own_proc = True
        self.over = {}  # pid: what wait4 said of it
        # What is the same for every program is done here, once, and inherited. The rest is in confine().
        most = {name: resource.getrlimit(number)[1] for name, number in RLIMITS.items()}
        self.most = {name: value if value != resource.RLIM_INFINITY else math.inf for name, value in most.items()}
        self.limit(CORE=0, MEMLOCK=0, MSGQUEUE=0, SIGPENDING=64)
        if tier == "unsafe":
            return
        if sys.platform != "linux" or platform.machine() not in ARCHES:
            raise OSError(errno.ENOSYS, f"no table of system calls for {sys.platform} {platform.machine()}", "seccomp")
        self.filter = Filter(bpf(links=tier == "ns"))
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        if tier == "ns":
            self.enter_namespaces()
        else:
            self.rules = landlock_rules()
            # As root, take a spare id, if that can read the standard library (not so for a Python in /root).
            folder, public = os.path.realpath(sysconfig.get_path("stdlib")), True
            while folder != "/":
                public = public and bool(os.stat(folder).st_mode & 1)
                folder = os.path.dirname(folder)
            if os.geteuid() == 0 and public:
                become_spare()
            drop_capabilities()
            libcall("prctl(PR_SET_DUMPABLE)", libc.prctl, 4, 0, 0, 0, 0)
        libcall("prctl(PR_SET_NO_NEW_PRIVS)", libc.prctl, 38, 1, 0, 0, 0)
        self.pid = os.getpid()
        self.own_proc = tier == "landlock" and os.readlink("self", dir_fd=self.proc) == str(self.pid)
        self.restrict = [ctypes.c_long(LANDLOCK_RESTRICT), *words(self.rules or 0, 0)]
        self.not_dumpable, self.die_with_parent = words(4, 0, 0, 0, 0), words(1, signal.SIGKILL, 0, 0, 0)
        self.close_from = {n: [ctypes.c_long(NEWER[0]), *words(n, 0xFFFFFFFF, 0)] for n in (5, 6)}

    def enter_namespaces(self):
        uid, gid = os.geteuid(), os.getegid()
        if uid == 0:
            unshare("ns", "net", "ipc", "uts")
            socket.sethostname("sandbox")
            build_root()
            become_spare()
            uid = gid = SPARE_UID
            libcall("prctl(PR_SET_DUMPABLE)", libc.prctl, 4, 1, 0, 0, 0)  # or /proc/self/uid_map would belong to root
            unshare("user", "pid")
            map_ids(self.proc, uid, gid)
        else:
            unshare("user", "ns", "net", "ipc", "uts", "pid")
            map_ids(self.proc, uid, gid)
            socket.sethostname("sandbox")
            build_root()
        # From here on this process only waits. Its child is the first of a pid namespace: when that one ends, the
        # kernel kills all in it.
        child = os.fork()
        if child:
            self.control.close()
            self.keep(child)
        libcall("prctl(PR_SET_PDEATHSIG)", libc.prctl, 1, signal.SIGKILL, 0, 0, 0)
        self.pidns = os.open("self/ns/pid", os.O_RDONLY, dir_fd=self.proc)

    def keep(self, child):
        parent, handle = os.getppid(), os.pidfd_open(child)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while not poll.poll(1000):
            if os.getppid() != parent:  # the trainer is gone; a fork of it may still hold our socket open
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os._exit(0)

    def serve(self):
        rest, fds = b"", []
        self.parent = os.getppid()
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        while True:
            if not poll.poll(1000):
                if os.getppid() != self.parent:
                    return
                continue
            data, new, _, _ = socket.recv_fds(self.control, 65536, 8)
            if not data:
                return
            fds += new
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line != b"kill":  # that came too late for the program before
                    try:
                        reply = self.run(json.loads(line), fds)
                    except OSError as error:  # told, and the server ends: what it forked ends with it
                        self.control.sendall(json.dumps({"reason": "setup: " + describe_step(error)}).encode() + b"\n")
                        raise
                    self.control.sendall(json.dumps(reply).encode() + b"\n")
                    fds = []

    def run(self, limits, fds):
        """fds: stdin, output, channel of one process, or of candidate and tests. One reply."""
        groups = [fds[i:i + 3] for i in range(0, len(fds), 3)]
        links = [end.detach() for end in socket.socketpair()] if len(groups) == 2 else []
        children, reply = [], {"reason": "", "delay": None}
        started = time.monotonic()
        try:
            for i, group in enumerate(groups):
                pid, outside = self.fork(limits, group + links[i:i + 1])
                children.append((pid, outside))
                if outside == 0:
                    break
            for fd in fds + links:
                os.close(fd)
            if children[-1][1]:  # the last process decides: the tests, or the only one
                # The wall limit leaves out the time in which the program stood in line for a CPU, up to as much again.
                deadline, latest = started + limits["wall_s"], started + 2 * limits["wall_s"]
                while (reason := self.wait(children, deadline, limits)) == "wall":
                    reply["delay"] = self.delay(children)
                    deadline = min(started + limits["wall_s"] + (reply["delay"] or 0), latest)
                    if time.monotonic() >= deadline - 0.01:
                        break
                reply["reason"] = reason
            else:
                reply["reason"] = "setup: " + self.problem
        finally:
            ended = []
            for pid, _ in children:
                alive = not self.is_over(pid)
                if alive:
                    (os.killpg if self.tier == "unsafe" else os.kill)(pid, signal.SIGKILL)
                    self.over[pid] = os.wait4(pid, 0)
                _, status, usage = self.over.pop(pid)
                # a candidate that is still there when its tests have ended did nothing wrong
                code = 0 if alive and not reply["reason"] else os.waitstatus_to_exitcode(status)
                ended.append([code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024])
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
        return reply | {"wall": time.monotonic() - started, "ended": ended}

    def is_over(self, pid):
        if pid not in self.over and (ended := os.wait4(pid, os.WNOHANG))[0]:
            self.over[pid] = ended
        return pid in self.over

    def fork(self, limits, fds):
        """(pid, pid as /proc has it), the latter 0 if the child could not be confined."""
        reader, writer = os.pipe()
        if self.pidns is not None:
            unshare("pid")
        pid = fork()
        if pid == 0:
            code = 1
            try:
                # its pid as /proc has it, if that is not ours
                outside = b"0" if self.own_proc else os.readlink("self", dir_fd=self.proc).encode()
                try:
                    self.confine(limits, fds + [writer])
                except BaseException as error:
                    os.write(len(fds) + 1, f"! {describe_step(error)}".encode())
                    raise
                os.write(len(fds) + 1, outside)
                os.close(len(fds) + 1)  # before any code of the program: a program cannot send this
                code = forked_main()
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        if self.pidns is not None:
            libcall("setns(pid)", libc.setns, self.pidns, CLONE["pid"])
        os.close(writer)
        text = os.read(reader, 500).decode()
        os.close(reader)
        if text.isdigit():
            return pid, int(text) or pid
        self.problem = text or "the child ended"
        return pid, 0

    def confine(self, limits, fds):
        """Everything a candidate may not do. The order matters; seccomp is last."""
        # 0 stdin, 1 and 2 output, then channel, link, ready pipe. High numbers first: none of them may be overwritten.
        order = [fds[0], fds[1], fds[1], *fds[2:]]
        if self.tier == "ns":
            uid, gid = os.geteuid(), os.getegid()
            unshare("user", "ns", "ipc")
            map_ids(self.proc, uid, gid)
            mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV | NOEXEC,
                  f"size={limits['scratch_mb']}m,nr_inodes={limits['inodes']},mode=0700")
            os.chdir("/tmp")
        elif self.tier == "landlock":
            attempt("landlock_restrict_self", libc.syscall, self.restrict)
        else:
            os.setsid()
        high = [os.dup2(fd, 200 + i) for i, fd in enumerate(order)]
        for i, fd in enumerate(high):
            os.dup2(fd, i)
        if self.tier == "unsafe":
            os.closerange(len(high), 4096)
        else:
            attempt("close_range", libc.syscall, self.close_from[len(high)])
        if sys.platform == "linux":  # macOS refuses it
            self.limit(AS=limits["memory_mb"] << 20)
        self.limit(CPU=math.ceil(limits["cpu_s"]) + 1, FSIZE=limits["fsize_mb"] << 20, NOFILE=limits["nofile"])
        if self.tier == "unsafe":
            return
        if self.tier == "ns":
            # NPROC counts in this user namespace here; elsewhere all of the user's processes, so the server counts.
            self.limit(NPROC=limits["threads"] + 1)
            drop_capabilities()
            attempt("prctl(PR_SET_DUMPABLE)", libc.prctl, self.not_dumpable)
        attempt("prctl(PR_SET_PDEATHSIG)", libc.prctl, self.die_with_parent)
        if self.tier == "landlock" and os.getppid() != self.pid:
            os._exit(1)
        self.filter.install()

    def limit(self, **values):
        for name, value in values.items():
            if name in RLIMITS:
                value = min(value, self.most[name])
                resource.setrlimit(RLIMITS[name], (value, value))

    def wait(self, children, deadline, limits):
        """Until the last child ends: '' then, else why it must be killed."""
        handle = os.pidfd_open(children[-1][0]) if hasattr(os, "pidfd_open") else None
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        if handle is not None:
            poll.register(handle, select.POLLIN)
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return "wall"
                if os.getppid() != self.parent:
                    return "gone"
                step = min(left, 0.002 if handle is None else 0.1 if self.tier == "ns" else 0.02)
                for fd, _ in poll.poll(step * 1000 + 1):
                    if fd == handle:
                        return ""
                    if not self.control.recv(64):
                        return "gone"
                    return "kill"
                if handle is None and self.is_over(children[-1][0]):
                    return ""
                if any(self.cpu(pid) > limits["cpu_s"] for pid, _ in children):
                    return "cpu"
                most = limits["threads"] + 1
                if self.tier == "landlock" and any(self.threads(outside) > most for _, outside in children):
                    return "threads"
        finally:
            if handle is not None:
                os.close(handle)

    def cpu(self, pid):
        # The clock of that process. RLIMIT_CPU counts in ticks, and is half a second off on a loaded machine.
        try:
            return time.clock_gettime(~pid << 3 | 2)
        except OSError:
            return 0.0

    def threads(self, outside):
        try:
            return os.stat(f"{outside}/task", dir_fd=self.proc).st_nlink - 2
        except FileNotFoundError:
            return 0

    def delay(self, children):
        """Seconds that the processes waited for a CPU; None where the kernel does not say."""
        total = 0.0
        for _, outside in children:
            try:
                fd = os.open(f"{outside}/schedstat", os.O_RDONLY, dir_fd=self.proc)
                total += int(os.read(fd, 200).split()[1]) / 1e9
                os.close(fd)
            except (OSError, IndexError, TypeError):
                return None
        return total


def describe_step(error):
    if isinstance(error, OSError) and error.errno:
        return f"{error.filename or 'system call'}: {errno.errorcode.get(error.errno, error.errno)} ({error.strerror})"
    return f"{type(error).__name__}: {error}"


# What solutions use, so that each fork has it. asyncio, and unittest.mock which imports it, are left out: their memory
# would slow every fork.
PRELOAD = """
abc bisect collections collections.abc contextlib copy dataclasses datetime decimal enum fractions functools heapq io
itertools json math numbers operator random re string struct textwrap threading time types typing unittest""".split()


def warm_up():
    """Runs what every fork will run: with caches and specialised bytecode in place, a fork writes to fewer pages."""
    ours, theirs = socket.socketpair()
    job = {"role": "call", "source": "def f(a, b):\n    return [a, b]\n", "entry": None, "calls": [[1, 2]] * 4}
    for _ in range(20):
        send_frame(ours, job)
        call_role(End(theirs.fileno()), None, recv_frame(End(theirs.fileno()), 1 << 20))
        ours.recv(65536)
    ours.close()
    theirs.close()
    del sys.modules["candidate"]
    linecache.clearcache()


def server_main(fd, tier):
    control = socket.socket(fileno=fd)
    try:
        for name in PRELOAD:
            __import__(name)
        builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # which -S leaves out
        if sys.platform == "linux":
            libc.mallopt(-8, 1)  # one arena: each thread's own would take 64 MiB of address space
        warm_up()
        server = Server(control, tier)
    except Exception as error:  # reported, and the server ends
        control.sendall(json.dumps({"failed": describe_step(error)}).encode() + b"\n")
        return
    # Descriptors 0 to 2 are other files in every fork, the objects the same. 1 means line by line: a killed program
    # leaves its output.
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    sys.argv = [""]
    os.environ.clear()
    random.seed(0)  # every fork inherits it: a program's numbers are the same in each run
    gc.collect()
    gc.freeze()  # or every fork would copy the pages that the collector writes to
    if sys.platform == "linux":
        libc.malloc_trim(0)  # a quarter of the pages, which each fork and each exit would go through
    control.sendall(b'{"ready": true}\n')
    server.serve()


# ---------------------------------------------------------------------------------------------------------------------
# The parent

class ServerFault(Exception):
    """The server died, hung or wrote something else than a reply."""


class Stream:
    """What the parent writes to and reads from one descriptor of a program."""

    def __init__(self, fd, cap, outgoing=b"", tail=0):
        self.fd, self.cap, self.outgoing, self.tail_cap = fd, cap, memoryview(outgoing), tail
        self.head, self.tail, self.total, self.open = bytearray(), b"", 0, True
        os.set_blocking(fd, False)

    def write(self):
        try:
            self.outgoing = self.outgoing[os.write(self.fd, self.outgoing[:1 << 18]):]
        except BlockingIOError:
            pass
        except OSError:  # the process is gone; what it left is still read
            self.outgoing = memoryview(b"")

    def read(self):
        """False at the end."""
        try:
            data = os.read(self.fd, 1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self.total += len(data)
        keep = self.cap - len(self.head)
        self.head += data[:keep]
        if self.tail_cap and len(data) > keep:
            self.tail = (self.tail + data[max(keep, 0):])[-self.tail_cap:]
        self.open = bool(data)
        return self.open

    @property
    def over(self):
        return self.total > self.cap + self.tail_cap

    def text(self):
        cut = self.total - len(self.head) - len(self.tail)
        marker = f"\n[... {cut} bytes cut ...]\n".encode() if cut else b""
        return (bytes(self.head) + marker + self.tail).decode("utf-8", "replace")


class Worker:
    """One server and the parent's end of it."""

    def __init__(self, tier):
        self.tier, self.process, self.control, self.programs = tier, None, None, 0

    def start(self):
        """Starts a server and proves it: SandboxUnavailable with the failing step, or with what the probe could do."""
        import subprocess  # here and in two more functions: servers and their forks are smaller without

        self.kill()
        ours, theirs = socket.socketpair()
        # Nothing of the parent's: keys and tokens live there. Symbols are bound at the start, not once in every fork.
        environment = {"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}
        # An import, since that finds the cached bytecode: what the compiler leaves in memory would slow every fork.
        start = (f"import sys; sys.path.append({os.path.dirname(os.path.abspath(__file__))!r}); import sandbox; "
                 f"sys.path.pop(); sandbox.server_main({theirs.fileno()}, {self.tier!r})")
        command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", start, "--server"]
        try:
            self.control, self.rest = ours, b""
            null = subprocess.DEVNULL
            self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=null,
                                            stdout=null, stderr=null, start_new_session=True, cwd="/")
            theirs.close()
            reply = self.reply(time.monotonic() + 30)
            if reply != {"ready": True}:
                raise SandboxUnavailable(f"tier {self.tier}: {reply.get('failed', 'the server did not start')}")
            if self.tier != "unsafe":
                self.prove()
        except ServerFault as error:
            self.kill()
            raise SandboxUnavailable(f"tier {self.tier}: start of the server: {error}") from None
        except BaseException:
            self.kill()
            raise
        finally:
            theirs.close()
        self.programs = 0

    def prove(self):
        with contextlib.ExitStack() as stack:
            port = 9
            with contextlib.suppress(OSError):  # no loopback here: nothing to reach then, and the probe must still fail
                port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            calls = [encode([os.path.abspath(__file__), port, Limits.memory_mb])]
            job = {"role": "call", "source": PROBE, "entry": "probe", "calls": calls}
            reply, (channel,), output = self.run([job], Limits(wall_s=20, cpu_s=10), b"")
        try:
            lines = [read_json(line) for line in bytes(channel.head).splitlines()]
            breaches = decode(lines[0][1])
        except (ValueError, IndexError, TypeError):
            breaches = [f"the probe gave no answer, status {reply['ended'][0][0]}: {bytes(channel.head)[:200]!r} "
                        f"{output.text()[-200:]!r}"]
        if len(lines) != 1 or breaches:
            raise SandboxUnavailable(f"tier {self.tier}: self-test: {', '.join(map(str, breaches))}")

    def kill(self):
        import subprocess

        process, self.process = self.process, None
        if process is None:
            return
        try:
            self.control.shutdown(socket.SHUT_RDWR)  # also where a fork of this process holds a copy of the descriptor
        except OSError:
            pass  # the server is gone already
        self.control.close()
        try:
            process.wait(1)  # it kills its program, waits for it, and ends
        except subprocess.TimeoutExpired:
            process.kill()  # stopped or stuck: the kernel takes the rest with it
            process.wait()

    def close(self):
        self.kill()

    def reply(self, deadline, streams=(), on_flood=None):
        """One line of the server as a dict, while the streams flow."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        by_fd = {s.fd: s for s in streams}
        for stream in streams:
            if stream.outgoing:
                stream.write()
        if streams and all(not s.outgoing for s in streams):
            poll.poll(10)  # the server alone: a short program then costs one wake-up, not one for each of its results
        for stream in streams:
            poll.register(stream.fd, select.POLLIN | (select.POLLOUT if stream.outgoing else 0))
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerFault("no reply in time")
            for fd, event in poll.poll(left * 1000 + 1):
                if fd == self.control.fileno():
                    try:
                        data = self.control.recv(65536)
                    except OSError:
                        data = b""
                    self.rest += data
                    if not data or len(self.rest) > 65536:
                        raise ServerFault("the server sent garbage" if data else "the server is gone")
                    continue
                stream = by_fd[fd]
                if event & select.POLLOUT:
                    stream.write()
                    if not stream.outgoing:
                        poll.modify(fd, select.POLLIN)
                if event & ~select.POLLOUT and not stream.read():
                    poll.unregister(fd)
                if on_flood and stream.over:
                    on_flood(stream)
        line, self.rest = self.rest.split(b"\n", 1)
        try:
            message = read_json(line)
        except ValueError:
            message = None
        if type(message) is not dict or self.rest:
            raise ServerFault("the server sent garbage")
        return message

    def run(self, jobs, limits, stdin):
        """
        jobs: one message for each process, the candidate's first. Returns the server's reply, the channel of each, and
        the candidate's output. The caller restarts the server after a ServerFault.
        """
        mine, given, streams = [], [], []
        half = limits.output_kb * 1024 // 2
        try:
            for job in jobs:
                frame = json.dumps(job).encode()
                ours, theirs = socket.socketpair()
                mine.append(ours)
                given.append(stdin_file(stdin))
                reader, writer = os.pipe()
                given += [writer, theirs.detach()]
                mine.append(open(reader, "rb", buffering=0))
                trusted = job["role"] == "tests"
                streams.append(Stream(ours.fileno(), 1 << 26 if trusted else limits.result_kb * 1024,
                                      struct.pack(">I", len(frame)) + frame))
                streams.append(Stream(reader, half, tail=half))
            flooded = []

            def stop(stream):
                # Results over the cap end the program at once; output is drained and cut until it is absurd.
                if not flooded and (stream in streams[::2] or stream.total > 1024 * limits.output_kb * 1024):
                    flooded.append(stream)
                    self.control.sendall(b"kill\n")

            try:
                socket.send_fds(self.control, [json.dumps(vars(limits)).encode() + b"\n"], given)
            except OSError:
                raise ServerFault("the server is gone") from None
            for fd in given:
                os.close(fd)
            given = []
            self.programs += 1
            reply = self.reply(time.monotonic() + 2 * limits.wall_s + GRACE_S, streams, stop)
            ended = reply.get("ended")
            if (set(reply) != {"reason", "delay", "wall", "ended"} or type(ended) is not list or len(ended) != len(jobs)
                    or any(type(e) is not list or [type(x) for x in e] != [int, float, float] for e in ended)
                    or type(reply["reason"]) is not str or type(reply["wall"]) is not float):
                if str(reply.get("reason")).startswith("setup"):
                    raise ServerFault(reply["reason"])
                raise ServerFault("the server sent garbage")
            if reply["reason"].startswith("setup"):
                raise ServerFault(reply["reason"])
            for stream in streams:  # what is left in the pipes; all writers are dead
                before = -1
                while stream.open and stream.total != before:
                    before = stream.total
                    stream.read()
            return reply, streams[::2], streams[1]
        finally:
            for fd in given:
                os.close(fd)
            for end in mine:
                end.close()


def stdin_file(data):
    if not data:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("stdin") if hasattr(os, "memfd_create") else None
    if fd is None:
        raise SandboxUnavailable("stdin needs memfd_create, which this system lacks")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# Every line of it must fail. Run by each new server, on the path that every candidate takes.
PROBE = '''
import ctypes, os, socket
def probe(canary, port, memory_mb):
    libc = ctypes.CDLL(None, use_errno=True)
    def read_canary(): open(canary).read()
    def connect(): socket.create_connection(("127.0.0.1", port), 2)
    def make_socket(): socket.socket(socket.AF_UNIX)
    def fork():
        if os.fork() == 0: os._exit(0)
    def execute(): os.execv("/bin/true", ["true"])
    def write_outside():
        here = os.path.dirname(canary), os.path.dirname(os.__file__)
        for folder in ("/", "/usr/lib", "/dev", "/var/tmp", "/home", *here):
            try: open(folder + "/sandbox-probe", "w").close()
            except OSError: continue
            os.unlink(folder + "/sandbox-probe")
            return
        raise OSError("held")
    def exceed_memory(): bytearray(memory_mb << 20)
    def signal_parent():
        os.kill(os.getppid(), 0)
    def namespaces():
        if libc.unshare(0x10000000) == 0: return
        raise OSError(ctypes.get_errno(), "held")
    def mount():
        if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"") == 0: return
        raise OSError(ctypes.get_errno(), "held")
    breaches = []
    for attempt in (read_canary, connect, make_socket, fork, execute, write_outside, exceed_memory, signal_parent,
                    namespaces, mount):
        try:
            attempt()
            breaches.append(attempt.__name__)
        except (OSError, MemoryError):
            pass
    return breaches
'''


def candidate_module(tests, helpers):
    """The first module that the tests import and that is neither of the standard library nor a helper."""
    own = {name.removesuffix(".py") for name in helpers}
    for node in ast.walk(ast.parse(tests)):
        imported = isinstance(node, ast.Import)
        names = [alias.name for alias in node.names] if imported else [getattr(node, "module", None)]
        for name in names:
            if name and name.split(".")[0] not in sys.stdlib_module_names and name not in own:
                return name
    raise ValueError("the tests import no module of the candidate's: pass module=")


class Sandbox:
    """
    workers  programs at a time, one server each; threads may share a Sandbox
    limits   for every program; by default Limits() for function tasks and Limits.modules() for unittest modules
    tier     "ns" or "landlock" alone; by default the first that works. Its name is in .tier
    unsafe   where no tier works, run with rlimits only (tier "unsafe") in place of raising SandboxUnavailable
    """

    def __init__(self, workers=2, limits=None, tier=None, unsafe=False):
        if workers < 1:
            raise ValueError(f"workers is {workers}, want at least 1")
        if tier not in (None, "ns", "landlock") and not (tier == "unsafe" and unsafe):
            raise ValueError(f"tier is {tier!r}, want 'ns', 'landlock' or None")
        self.limits, self.module_limits = limits or Limits(), limits or Limits.modules()
        self.faults = self.retries = 0
        self.interrupted = False
        self.workers, self.idle, self.closed, self.pid = [], queue.LifoQueue(), False, os.getpid()
        problems = []
        for name in [tier] if tier else ["ns", "landlock"] + ["unsafe"] * unsafe:
            first = Worker(name)
            try:
                if sys.platform != "linux" and name != "unsafe":
                    raise SandboxUnavailable(f"tier {name}: {sys.platform} has neither namespaces nor Landlock")
                first.start()
                break
            except SandboxUnavailable as error:
                problems.append(str(error))
        else:
            raise SandboxUnavailable("; ".join(problems) + ". Nothing was run. --unsafe-sandbox (unsafe=True) runs "
                                     "programs with rlimits only: they can read your files and use the network.")
        self.tier, self.problems = name, problems
        self.workers = [first] + [Worker(name) for _ in range(workers - 1)]  # the others start when they are needed
        for worker in reversed(self.workers):
            self.idle.put(worker)
        atexit.register(self.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        atexit.unregister(self.close)
        if not self.closed and os.getpid() == self.pid:  # not in a fork of the trainer
            self.closed = True
            for worker in self.workers:
                worker.close()

    def execute(self, jobs, limits, stdin=b""):
        """One program on an idle worker. A server that died is replaced and the program run once more."""
        if self.closed or os.getpid() != self.pid:
            raise RuntimeError("this Sandbox is closed, or was made in another process: make one in each")
        worker = self.idle.get()
        try:
            for attempt in (1, 2):
                try:
                    if worker.process is None or worker.programs >= RECYCLE:
                        worker.start()
                    return worker.run(jobs, limits, stdin)
                except SandboxUnavailable:   # killed while it started: counted like any other death of a server
                    self.faults += 1
                    raise
                except ServerFault as fault:
                    worker.kill()
                    self.faults += 1
                    if attempt == 2 or self.interrupted:
                        raise SandboxUnavailable(f"tier {self.tier}: a server failed twice over one program: "
                                                 f"{fault}") from None
        except BaseException:
            worker.kill()  # in the middle of a program: its state is unknown
            raise
        finally:
            self.idle.put(worker)

    def judge(self, code, tests, **options):
        """Result of a program. tests and options: see judge_once."""
        return self.judge_many([{"code": code, "tests": tests, **options}], threads=0)[0]

    def judge_many(self, jobs, threads=None):
        """judge(**job) for every job, over all workers. Results in order."""
        jobs = list(jobs)
        results, errors, starved, todo, lock = [None] * len(jobs), [], [], iter(range(len(jobs))), threading.Lock()

        def work():
            while not errors:
                with lock:
                    i = next(todo, None)
                if i is None:
                    return
                try:
                    results[i], again = self.judge_once(**jobs[i])
                except BaseException as error:  # raised in the caller's thread
                    errors.append(error)
                    return
                if again:
                    starved.append(i)

        count = min(len(self.workers), len(jobs)) if threads is None else threads
        pool = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        try:
            for thread in pool:
                thread.start()
            for thread in pool:
                thread.join()
            if not pool:
                work()
        except BaseException as error:  # Ctrl-C: no verdict is made of what is half done
            errors.append(error)
            self.interrupted = True
            for worker in self.workers:
                if worker.process is not None:
                    worker.process.kill()
            for thread in pool:
                if thread.ident:
                    thread.join()
            self.interrupted = False
            raise
        if errors:
            raise errors[0]
        for i in starved:  # again, now that the machine is idle
            self.retries += 1
            results[i], _ = self.judge_once(**jobs[i])
        return results

    def run(self, code, stdin="", limits=None):
        """Runs a program, without a verdict: "pass" when it ended with exit code 0. Long output loses its middle."""
        limits = limits or self.limits
        if len(code.encode("utf-8", "surrogatepass")) > limits.source_kb * 1024:
            return Result("error", message=f"source is over {limits.source_kb} KiB", tier=self.tier)
        job = {"role": "run", "source": code}
        reply, (channel,), output = self.execute([job], limits, stdin.encode("utf-8", "surrogatepass"))
        status, message = self.verdict_of_end(reply, channel, output, limits, run=True)
        if not status:
            exit_code = reply["ended"][0][0]
            status, message = ("pass", "") if exit_code == 0 else ("error", f"exit status {exit_code}")
            if status == "error" and b'"MemoryError"' in channel.head:
                status, message = "memory", "ran out of memory"
        return self.result(status, (), message, reply, output)

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def judge_once(self, code, tests, entry=None, module=None, expect_tests=None, helpers=None, limits=None,
                   plain=False, detail=False):
        """
        tests        a list of ([args], expected), expected plain data, Raises or Approx; or source of a unittest module
        entry        function task: the function to call (default: the last one that `code` defines at top level)
        module       unittest: the name under which the tests import the candidate (default: read off their imports)
        expect_tests unittest: how many tests must pass (default: as many as ran, at least one)
        helpers      unittest: {file name: source} of trusted modules beside the tests
        plain        unittest: what a call returns must be plain data. Set it wherever the reference passes with it
        detail       put got and wanted values in the message: for tests that the writer of the code may see
        Returns (Result, whether it is a timeout that the machine is to blame for: judge tries those once more).
        """
        if not isinstance(code, str):
            raise TypeError(f"code is {type(code).__name__}, want str")
        limits = limits or (self.module_limits if isinstance(tests, str) else self.limits)
        if len(code.encode("utf-8", "surrogatepass")) > limits.source_kb * 1024:
            return Result("error", message=f"source is over {limits.source_kb} KiB", tier=self.tier), False
        if isinstance(tests, str):
            helpers = helpers or {}
            module = module or candidate_module(tests, helpers)
            jobs = [{"role": "serve", "source": code, "module": module},
                    {"role": "tests", "tests": tests, "helpers": helpers, "module": module, "plain": plain,
                     "cap": limits.result_kb * 1024}]
            reply, channels, output = self.execute(jobs, limits)
            result = self.module_verdict(reply, channels, output, limits, expect_tests, detail)
        else:
            calls = [encode(list(args), nodes=MAX_TRUSTED) for args, _ in tests]
            if not calls:
                raise ValueError("tests is empty: nothing would be judged")
            job = {"role": "call", "source": code, "entry": entry, "calls": calls}
            reply, (channel,), output = self.execute([job], limits)
            result = self.function_verdict(reply, channel, output, limits, [want for _, want in tests], detail)
        # A wall timeout counts if the program slept or spun; not if it stood in line for a CPU.
        delay = reply["delay"]
        busy = sum(e[1] for e in reply["ended"])
        starved = result.status == "timeout" and reply["reason"] == "wall" and (
            busy < limits.cpu_s / 2 if delay is None else delay > limits.wall_s / 4)
        return result, starved

    def result(self, status, per_test, message, reply, output):
        code, cpu, rss = reply["ended"][0]
        # half of the message may be the candidate's
        message = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in message[:500])
        return Result(status, tuple(per_test), message, output.text(), cpu, reply["wall"], rss, self.tier)

    def verdict_of_end(self, reply, channel, output, limits, run=False):
        """(status, message) of an end that is a verdict by itself, else ("", "")."""
        if channel.over:
            return "output", f"results are over {limits.result_kb} KiB"
        if output.over and (not run or reply["reason"] == "kill"):
            return "output", f"output is over {limits.output_kb} KiB"
        if reply["reason"] == "wall":
            return "timeout", f"no end after {limits.wall_s:g} s"
        # RLIMIT_CPU counts in ticks: the kernel may kill a little before the clock says so.
        if reply["reason"] == "cpu" or any(cpu >= limits.cpu_s * (0.9 if code == -signal.SIGKILL else 1)
                                           for code, cpu, _ in reply["ended"]):
            return "timeout", f"over {limits.cpu_s:g} s of CPU time"
        if reply["reason"] == "threads":
            return "error", f"more than {limits.threads} threads"
        return "", ""

    def function_verdict(self, reply, channel, output, limits, wants, detail):
        status, message = self.verdict_of_end(reply, channel, output, limits)
        data = bytes(channel.head)
        lines, rest = data.split(b"\n")[:-1], data.rpartition(b"\n")[2]
        passed, memory, malformed = [], False, bool(rest)
        for i, line in enumerate(lines):
            try:
                kind, *body = read_json(line)
                if kind == "load" and i == 0 and len(lines) == 1 and not rest:
                    names, text = body
                    if not status:
                        status = "memory" if "MemoryError" in names else "error"
                        message = f"the program did not load: {names[0]}: {text}"
                    break
                if kind == "v":
                    got, = body
                    got, names = decode(got), None
                elif kind == "x":
                    names, got = body
                    _exact(str, names), _exact(str, [got])
                    memory |= "MemoryError" in names
                else:
                    raise ValueError("unknown kind of result")
            except (ValueError, TypeError, IndexError):
                malformed = True
                break
            if i >= len(wants):
                malformed = True
                break
            passed.append(self.right(names, got, wants[i]))
            if not passed[-1] and not message:
                said = f"test {i + 1} of {len(wants)}: "
                said += f"raised {names[0] if names else 'nothing'}" if names is not None else "wrong answer"
                if detail:
                    said += f": {got}" if names is not None else f": got {shown(got)}, want {shown(wants[i])}"
                message = said if not status else message
        if not status:
            code = reply["ended"][0][0]
            if malformed:
                status, message, passed = "protocol", "results are malformed", []
            elif memory and not all(passed):
                status, message = "memory", "ran out of memory"
            elif len(passed) < len(wants):
                status = "protocol" if code == 0 else "error"
                message = f"ended with status {code} after {len(passed)} of {len(wants)} results"
            elif code != 0:
                status, message = "error", f"ended with status {code}"
            else:
                status = "pass" if all(passed) else "fail"
        per_test = (passed + [False] * len(wants))[:len(wants)]
        return self.result(status, per_test, message, reply, output)

    @staticmethod
    def right(names, got, want):
        if names is not None:  # an exception matches only a test that expects it
            return (isinstance(want, Raises) and want.name in names and (want.text is None or want.text[:200] == got)
                    and not {"SystemExit", "KeyboardInterrupt", "GeneratorExit"} & set(names))
        if isinstance(want, Raises):
            return False
        try:
            return same(got, want)
        except (ArithmeticError, ValueError, TypeError, RecursionError):
            return False  # what cannot be compared (a signalling NaN, an integer beyond any float) is not wanted

    def module_verdict(self, reply, channels, output, limits, expect_tests, detail):
        status, message = self.verdict_of_end(reply, channels[0], output, limits)
        outcomes, done = {}, None
        for line in bytes(channels[1].head).split(b"\n")[:-1]:
            name, *body = read_json(line)
            if name == "load":
                if not status:
                    status = "memory" if "MemoryError" in body[0] else "error"
                    message = f"the program did not load: {body[0][0]}: {body[1]}"
            elif name == "done":
                done = body
            else:
                right = body[0] and outcomes.get(name, True)
                outcomes[name] = right
                if not right and not message:
                    message = f"{name.removeprefix('hidden_tests.')} {body[1]}" + (f": {body[2]}" if detail else "")
        per_test = list(outcomes.values())
        wanted = len(per_test) if expect_tests is None else expect_tests
        if not status:
            code = reply["ended"][0][0]
            if done is None:
                status, message = "error", f"the tests ended early ({reply['ended'][1][0]}, the program {code})"
            elif done[1] and not all(per_test):
                status, message = "memory", "ran out of memory"
            elif per_test and all(per_test) and len(per_test) == done[0] == wanted:
                status, message = "pass", ""
            elif code:  # it ended, or was ended, with tests to come: not the same as a wrong answer
                status, message = "error", f"ended with status {code} before its tests did"
            else:
                status = "fail"
                message = message or f"{sum(per_test)} tests passed, want {wanted or 'at least one'}"
        if expect_tests is not None:
            per_test = (per_test + [False] * expect_tests)[:expect_tests]
        return self.result(status, per_test, message, reply, output)


def shown(value):
    try:
        return repr(value)[:150]
    except (ValueError, RecursionError):  # an integer over the digits that Python prints
        return f"a large {type(value).__name__}"


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def rate(box, seconds=2.0):
    """Programs per second: ten calls of a trivial function each, over all workers."""
    job = {"code": "def add(a, b):\n    return a + b\n", "tests": [([i, 1], i + 1) for i in range(10)], "entry": "add"}
    box.judge_many([job] * 2 * len(box.workers))  # starts every server
    started, n = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        results = box.judge_many([job] * 50)
        if not all(r.passed for r in results):
            raise RuntimeError(f"a right program did not pass: {next(r for r in results if not r.passed)}")
        n += len(results)
    return n / (time.monotonic() - started)


def fresh_rate(workers=2, seconds=2.0):
    """Fresh interpreters that import unittest, per second: what the sandbox is measured against."""
    import subprocess

    counts = [0] * workers
    started = time.monotonic()

    def work(i):
        while time.monotonic() - started < seconds:
            subprocess.run([sys.executable, "-I", "-S", "-c", "import unittest, json"], check=True)
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - started)


HOLDS = """holds:     one process without fork, exec, sockets, signals to others or new namespaces; wall, CPU, memory,
           threads, descriptors, files, output and results bounded; reads the standard library and shared libraries
           only; never holds an expected value
holds not: kernel bugs, timing side channels{more}; put a container or gVisor around code from strangers"""


def bad_input(message):
    print(f"sandbox.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def get_args(argv=None):
    import argparse

    parser = argparse.ArgumentParser(description="Run programs that a model wrote.", allow_abbrev=False)
    parser.add_argument("file", nargs="?", help="program to judge (without it: print what this machine offers)")
    parser.add_argument("--tests", help="unittest module (.py), or JSON list of [[arguments], expected] (.json)")
    parser.add_argument("--entry", help="function to call (default: the last one that the program defines)")
    parser.add_argument("--tier", choices=["ns", "landlock"], help="this tier only (default: the first that works)")
    parser.add_argument("--unsafe-sandbox", action="store_true", help="where no tier works, run with rlimits only")
    parser.error = bad_input   # one line, without the usage
    args = parser.parse_args(argv)
    if bool(args.file) != bool(args.tests):
        parser.error("FILE and --tests go together: python sandbox.py FILE --tests FILE")
    return args


def main(argv=None):
    args = get_args(argv)
    try:
        if not args.file:
            fresh = fresh_rate()
            print(f"fresh interpreter that imports unittest: {fresh:.0f} programs/s on 2 workers")
            for tier in [args.tier] if args.tier else ["ns", "landlock"]:
                try:
                    with Sandbox(workers=2, tier=tier) as box:
                        speed = rate(box)
                        more = "; stat of host paths and names in site-packages stay visible" * (tier == "landlock")
                        print(f"\ntier {tier}: {speed:.0f} programs/s, {speed / fresh:.1f} times as many")
                        print(HOLDS.format(more=more))
                except SandboxUnavailable as error:
                    print(f"\ntier {tier}: not available. {error}")
            return 0
        try:
            code, tests = (open(path, encoding="utf-8").read() for path in (args.file, args.tests))
            if args.tests.endswith(".json"):
                tests = [(list(a), want) for a, want in json.loads(tests)]
        except (OSError, ValueError, TypeError) as error:
            bad_input(f"{args.file} with --tests {args.tests}: {error}")
        with Sandbox(workers=1, tier=args.tier, unsafe=args.unsafe_sandbox) as box:
            if box.tier == "unsafe":
                print("--unsafe-sandbox: rlimits only, the program can read files and use the network", file=sys.stderr)
            try:
                result = box.judge(code, tests, entry=args.entry, detail=True)
            except (ValueError, SyntaxError) as error:
                bad_input(f"{args.tests}: {error}")
        print(f"{result.status} ({sum(result.per_test)} of {len(result.per_test)} tests, tier {result.tier}) "
              f"{result.message}".rstrip())
        return 0 if result.passed else 1
    except SandboxUnavailable as error:
        print(f"sandbox.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
