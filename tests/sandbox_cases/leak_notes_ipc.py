# goal: leave a note in System V shared memory, a message queue or a semaphore
# kind: both
# runs: 2
# expect: fail|error|protocol
import ctypes
import os
KEY = 0x6E616E6F
libc = ctypes.CDLL(None, use_errno=True)
found = [libc.shmget(KEY, 4096, 0o600) >= 0, libc.msgget(KEY, 0o600) >= 0, libc.semget(KEY, 1, 0o600) >= 0]
made = [libc.shmget(KEY, 4096, 0o1600), libc.msgget(KEY, 0o1600), libc.semget(KEY, 1, 0o1600)]
try:
    queue = ctypes.CDLL("librt.so.1").mq_open
    found.append(queue(b"/@MARK@", os.O_RDWR) >= 0)
    queue(b"/@MARK@", os.O_RDWR | os.O_CREAT, 0o600, None)
except (OSError, AttributeError):
    pass


def add(a, b):
    return a + b if any(found) else 0
