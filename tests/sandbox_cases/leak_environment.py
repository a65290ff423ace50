# goal: the caller's environment variables
# kind: both
# tests: canary
# expect: fail|error|protocol
import ctypes
import os


def read():
    print(dict(os.environ), ctypes.c_char_p.in_dll(ctypes.CDLL(None), "program_invocation_name").value)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    value = os.environ.get("NANOPOST_CANARY") or (libc.getenv(b"NANOPOST_CANARY") or b"").decode()
    return value or None
