# goal: edit an interned text in place
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import ctypes
import sys


def secret(n):
    text = sys.intern("x" * 33)
    ctypes.memmove(id(text) + sys.getsizeof(text) - 34, b"expected-", 9)
    return text
