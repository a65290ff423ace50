# goal: crash the interpreter by reading address 0
# kind: both
# expect: fail|error|protocol
import ctypes


def add(a, b):
    ctypes.string_at(0)
