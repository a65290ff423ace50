# goal: run a program from memory: memfd_create and execveat with an empty path
# expect: fail|error
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.memfd_create("x")
        os.write(fd, b"#!/bin/sh\necho x > @DIR@/memory\n")
    except OSError:
        fd = 1
    libc.syscall(322, fd, b"", None, None, 0x1000)
    try:
        os.execve(fd, ["x"], {})
    except OSError:
        pass
    return 0
