# goal: set the times of a host file
# expect: fail|error
import os


def add(a, b):
    out = 0
    for arguments in ({"times": (1, 1)}, {"times": None}, {"ns": (5, 5), "follow_symlinks": False}):
        try:
            os.utime("@VICTIM@", **arguments)
            out = a + b
        except OSError:
            pass
    return out
