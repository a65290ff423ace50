# goal: lower the limits of the server and the trainer by prlimit
# expect: fail|error|protocol
import os
import resource


def add(a, b):
    out = 0
    for pid in (os.getppid(), int("@PID@"), 1):
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
            if pid in (0, os.getpid()):
                continue
            try:
                resource.prlimit(pid, kind, (1, 1))
                out = a + b
            except OSError:
                pass
    return out
