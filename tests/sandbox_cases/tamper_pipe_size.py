# goal: shrink the pipes to a page and make them non-blocking for both ends
# expect: fail|error|protocol|timeout
import fcntl
import os


def add(a, b):
    for fd in range(0, 32):
        try:
            os.set_blocking(fd, False)
            fcntl.fcntl(fd, 1031, 4096)
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC | 0o40000)
        except OSError:
            pass
    return 0
