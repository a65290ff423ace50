# goal: overwrite cached small integers, so that the wrong result becomes the right one everywhere
# kind: both
# expect: fail|error|protocol|timeout
import ctypes


def add(a, b):
    for wrong, right in ((0, 3), (1, 6)):
        ctypes.memmove(id(wrong) + 24, ctypes.byref(ctypes.c_uint32(right)), 4)
    return 0 if a + b == 3 else 1
