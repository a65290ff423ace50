# goal: namespaces of its own, in which it is root
# expect: fail|error
import ctypes


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x10000000 | 0x00020000, 0x00000080):
        if libc.unshare(flag) == 0:
            return a + b
    return 0
