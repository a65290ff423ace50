# goal: exit_group(0) by its number, past every patched Python name
# kind: both
# expect: fail|error|protocol
import ctypes
import platform


def add(a, b):
    ctypes.CDLL(None).syscall(94 if platform.machine() == "aarch64" else 231, 0)
