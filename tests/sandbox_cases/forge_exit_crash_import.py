# goal: crash while the module is imported
# kind: both
# expect: fail|error|protocol
import ctypes
ctypes.memset(0, 0, 1)


def add(a, b):
    return a + b
