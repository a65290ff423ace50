# goal: fork, let the child go on and the parent leave with status 0
# kind: both
# expect: fail|error|protocol
import os


def add(a, b):
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        return 0
    return a + b + 1
