# goal: make the server slow: priority, processor set, scheduling class, I/O priority
# expect: fail|error|protocol
import ctypes
import os


def add(a, b):
    out = 0
    for pid in (os.getppid(), int("@PID@")):
        if pid in (0, os.getpid()):
            continue
        for call in (lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.setpriority(os.PRIO_PGRP, os.getpgid(pid), 19),
                     lambda: os.sched_setaffinity(pid, {0}), lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))):
            try:
                call()
                out = a + b
            except OSError:
                pass
        if ctypes.CDLL(None).syscall(251, 1, pid, 3 << 13) == 0:
            out = a + b
    return out
