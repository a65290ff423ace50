# goal: clock, host name, kernel settings and the out-of-memory score
# expect: fail|error
import ctypes
import os
import time


def add(a, b):
    out = 0
    for path in ("/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state"):
        try:
            with open(path, "r+") as f:
                f.write(f.read())
            out = a + b
        except OSError:
            pass
    try:
        time.clock_settime(time.CLOCK_REALTIME, time.time())
        out = a + b
    except OSError:
        pass
    return a + b if ctypes.CDLL(None).sethostname(b"x", 1) == 0 else out
