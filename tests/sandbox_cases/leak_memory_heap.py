# goal: the expected value in the heap around a fresh object, read by address
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import ctypes
import re


def secret(n):
    base = id(object()) & ~0xFFFFF
    data = ctypes.string_at(base, 1 << 20)
    hit = re.search(b"expected-[0-9a-f]{24}", data)
    return hit and hit.group().decode()
