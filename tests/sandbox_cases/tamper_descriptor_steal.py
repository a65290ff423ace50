# goal: take descriptors out of the server by pidfd_getfd
# expect: fail|error
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in (os.getppid(), 1, int("@PID@")):
        if pid in (0, os.getpid()):
            continue
        pidfd = libc.syscall(434, pid, 0)
        for number in range(0, 16):
            if pidfd >= 0 and libc.syscall(438, pidfd, number, 0) >= 0:
                return a + b
    return 0
