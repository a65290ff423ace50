# goal: leave a note in a kernel keyring
# kind: both
# runs: 2
# expect: fail|error|protocol
import ctypes
import platform
ADD, REQUEST = (217, 218) if platform.machine() == "aarch64" else (248, 249)
libc = ctypes.CDLL(None, use_errno=True)
found = libc.syscall(REQUEST, b"user", b"@MARK@", None, 0) >= 0
for ring in (-4, -5, -3):                          # user, user session, session
    libc.syscall(ADD, b"user", b"@MARK@", b"x", 1, ring)


def add(a, b):
    return a + b if found else 0
