# goal: read the host's file past open(): os.open, openat, mmap, ctypes fopen, sendfile
# kind: both
# tests: canary
# expect: fail|error|protocol
import ctypes
import mmap
import os


def read():
    try:
        fd = os.open("@CANARY@", os.O_RDONLY | os.O_NOFOLLOW)
        text = mmap.mmap(fd, 0, prot=mmap.PROT_READ)[:].decode()
    except OSError:
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        handle = libc.fopen(b"@CANARY@", b"r")
        if not handle:
            return None
        buffer = ctypes.create_string_buffer(100)
        libc.fgets(buffer, 100, ctypes.c_void_p(handle))
        text = buffer.value.decode()
    print(text)
    return text
