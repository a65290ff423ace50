# goal: timers and parent-death signals aimed at other processes
# expect: fail|error|protocol
import ctypes
import os
import struct


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    event = ctypes.create_string_buffer(struct.pack("QiiI", 0, 9, 4, os.getppid()), 64)      # SIGEV_THREAD_ID of the parent
    timer = ctypes.c_int()
    if libc.syscall(222, 0, event, ctypes.byref(timer)) == 0:
        libc.syscall(223, timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1000), None)
    libc.prctl(1, 0, 0, 0, 0)                      # PR_SET_PDEATHSIG 0: outlive the server
    libc.prctl(36, 1, 0, 0, 0)
    return 0
