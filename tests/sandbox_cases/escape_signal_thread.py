# goal: tgkill, tkill, sigqueue and pidfd_send_signal, which a filter for kill() may miss
# expect: fail|error|protocol
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    info = ctypes.create_string_buffer(128)
    info[8:12] = b"\xff\xff\xff\xff"               # si_code SI_QUEUE
    for pid in (os.getppid(), int("@PID@")):
        if pid <= 0:
            continue
        libc.syscall(234, pid, pid, 9)
        libc.syscall(200, pid, 9)
        libc.syscall(129, pid, 9, info)
        libc.syscall(297, pid, pid, 9, info)
        pidfd = libc.syscall(434, pid, 0)
        libc.syscall(424, pidfd, 9, None, 0)
    return 0
