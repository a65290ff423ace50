# goal: fork by the numbers of clone, clone3, vfork and fork
# expect: fail|error
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    flags = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
    for arguments in ((56, 17, 0, 0, 0, 0), (435, flags, 88), (220, 17, 0, 0, 0, 0), (57,), (56, 0x10000011, 0, 0, 0, 0)):
        pid = libc.syscall(*arguments)
        if pid == 0:
            os._exit(0)
        if pid > 0:
            return a + b
    return 0
