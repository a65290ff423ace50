# goal: overflow the C stack by nested objects whose repr recurses in C
# expect: fail|error|memory|timeout|protocol
import sys


def add(a, b):
    sys.setrecursionlimit(10 ** 9)
    out = ()
    for _ in range(2_000_000):
        out = (out,)
    return hash(out)
