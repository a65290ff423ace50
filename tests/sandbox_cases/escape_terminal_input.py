# goal: push input into the terminal of the caller (TIOCSTI, TIOCLINUX)
# expect: fail|error
import fcntl
import os


def add(a, b):
    for fd in range(0, 16):
        for request in (0x5412, 0x541C):
            try:
                fcntl.ioctl(fd, request, b"\n")
                return a + b
            except OSError:
                pass
    return 0 if not os.isatty(0) else a + b
