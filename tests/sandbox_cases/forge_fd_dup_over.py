# goal: put the output pipe in the place of every other descriptor
# kind: both
# expect: fail|error|protocol|timeout
import os


def add(a, b):
    for fd in range(3, 64):
        try:
            os.fstat(fd)
            os.dup2(1, fd)
        except OSError:
            pass
    print("OK")
    return 0
