# goal: chroot and pivot_root, the classic way out of a chroot
# expect: fail|error
import ctypes
import os


def add(a, b):
    try:
        os.chroot(".")
        for _ in range(50):
            os.chdir("..")
        os.chroot(".")
        return a + b
    except OSError:
        pass
    return a + b if ctypes.CDLL(None).syscall(155, b".", b".") == 0 else 0
