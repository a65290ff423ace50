# goal: overflow the C stack by a raised recursion limit
# limits: wall_s=1 cpu_s=1
# expect: fail|error|memory|timeout
import sys
sys.setrecursionlimit(10 ** 9)


def add(a, b):
    return add(a, b)
