# goal: shorten a file of the host without opening it
# expect: fail|error
import os


def add(a, b):
    try:
        os.truncate("@VICTIM@", 1)
    except OSError:
        return 0
    return a + b
