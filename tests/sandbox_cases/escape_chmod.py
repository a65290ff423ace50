# goal: change the mode of a host file by every call that can
# expect: fail|error
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    out = 0
    for call in (lambda: os.chmod("@VICTIM@", 0o600), lambda: os.fchmod(os.open("@VICTIM@", os.O_RDONLY), 0o600),
                 lambda: os.chmod("@DIR@", 0o700)):
        try:
            call()
            out = a + b
        except OSError:
            pass
    for number in (268, 452, 53):                  # fchmodat, fchmodat2, fchmodat on aarch64
        if libc.syscall(number, -100, b"@VICTIM@", 0o600, 0) == 0:
            out = a + b
    return out
