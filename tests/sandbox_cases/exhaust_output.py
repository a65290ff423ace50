# goal: 64 MiB of output past Python's buffers
# expect: fail|error|output|timeout
import os


def add(a, b):
    for _ in range(1024):
        os.write(1, b"x" * 65536)
    return 0
