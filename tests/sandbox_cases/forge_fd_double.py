# goal: send every answer twice by a patched os.write, so that later tests read the right one
# kind: both
# expect: fail|error|protocol|timeout
import os
real = os.write


def twice(fd, data):
    real(fd, data)
    return real(fd, data)


os.write = twice


def add(a, b):
    return {3: 3, 14: 3}.get(a + b, 3)
