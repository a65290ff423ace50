# goal: undo the limits that prctl set, or hold any capability
# expect: fail|error
import ctypes


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    have = (ctypes.c_uint32 * 6)()
    libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), have)
    undone = [libc.prctl(38, 0, 0, 0, 0) == 0,                    # PR_SET_NO_NEW_PRIVS 0
              libc.prctl(39, 0, 0, 0, 0) != 1,                    # it must be set
              libc.prctl(21, 0, 0, 0, 0) in (0, 1),               # PR_GET_SECCOMP: no filter (refusing to say is fine)
              libc.prctl(47, 2, 21, 0, 0) == 0,                   # raise an ambient capability
              any(have[i] for i in (0, 1, 3, 4))]                 # effective or permitted ones are left
    print(undone)
    return a + b if any(undone) else 0
