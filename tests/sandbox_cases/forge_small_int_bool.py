# goal: make False a True by its memory
# kind: both
# expect: fail|error|protocol|timeout
import ctypes
ctypes.memmove(id(False) + 24, ctypes.byref(ctypes.c_uint32(1)), 4)
ctypes.memmove(id(False) + 16, ctypes.byref(ctypes.c_uint64(1)), 8)


def add(a, b):
    return False
