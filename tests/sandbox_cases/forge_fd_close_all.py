# goal: close every descriptor, so that the missing answer may read as no failure
# kind: both
# expect: fail|error|protocol
import os


def add(a, b):
    os.closerange(0, 1024)
    return 0
