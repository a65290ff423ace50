# goal: flood with empty lines and JSON openers to confuse a reader of lines
# kind: both
# expect: fail|error|protocol|output|timeout
import os


def add(a, b):
    for _ in range(64):
        os.write(2, b"\n" * 4096 + b"{[\"" * 4096)
    return 0
