# goal: name_to_handle_at and open_by_handle_at, which know no mount tree
# kind: both
# tests: canary
# expect: fail|error|protocol
import ctypes
import os
import platform
NAME, OPEN = (264, 265) if platform.machine() == "aarch64" else (303, 304)


def read():
    libc = ctypes.CDLL(None, use_errno=True)
    root = os.open("/", os.O_RDONLY)
    for inode in (2, 1, 128):                      # the root folder's usual inode numbers
        handle = (ctypes.c_uint32 * 8)(8, 1, inode, 0)
        fd = libc.syscall(OPEN, root, handle, os.O_RDONLY)
        if fd >= 0:
            return open(os.open("@CANARY@".lstrip("/"), os.O_RDONLY, dir_fd=fd)).read()
    if libc.syscall(NAME, root, b".", (ctypes.c_uint32 * 40)(128), ctypes.byref(ctypes.c_int()), 0) == 0:
        print("a handle was given")
