# goal: enter the namespaces of the parent
# expect: fail|error
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in (1, os.getppid()):
        pidfd = libc.syscall(434, pid, 0)
        if pidfd >= 0 and libc.setns(pidfd, 0x00020000) == 0:
            return a + b
        for name in ("mnt", "net", "pid", "user"):
            try:
                if libc.setns(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), 0) == 0:
                    return a + b
            except OSError:
                pass
    return 0
