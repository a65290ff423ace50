# goal: change the user, the groups and the capabilities
# expect: fail|error
import ctypes
import os


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    me = os.getresuid()
    for other in (0, 1, 1000, 65534):
        if other in me:
            continue
        for call in (os.setuid, os.seteuid, lambda u: os.setresuid(u, u, u), lambda u: os.setgroups([u])):
            try:
                call(other)
                return a + b
            except OSError:
                pass
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    return a + b if libc.capset(header, data) == 0 else 0
