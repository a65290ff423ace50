# goal: io_uring, which opens sockets and files past a filter of system calls
# expect: fail|error
import ctypes


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(120)
    return a + b if libc.syscall(425, 4, params) >= 0 else 0
