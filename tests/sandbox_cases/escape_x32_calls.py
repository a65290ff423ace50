# goal: socket() and fork() by their x32 numbers, which a filter by number may not know
# expect: fail|error|protocol
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(0x40000000 + 41, 2, 1, 0) >= 0:
        return a + b
    if libc.syscall(0x40000000 + 57) == 0:
        os._exit(0)
    return 0
