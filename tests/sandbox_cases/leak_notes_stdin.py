# goal: leave a note in the offset or flags of a descriptor that runs share
# kind: both
# runs: 2
# expect: fail|error|protocol|timeout
import fcntl
import os
found = False
for fd in (0, 1):                                  # 2 is the same pipe as 1
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        found |= bool(flags & os.O_APPEND) or (fcntl.fcntl(fd, fcntl.F_GETOWN) != 0)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_APPEND)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    except OSError:
        pass


def add(a, b):
    return a + b if found else 0
