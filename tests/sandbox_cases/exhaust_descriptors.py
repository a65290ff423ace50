# goal: more descriptors than are allowed
# expect: fail|error
import os


def add(a, b):
    made = []
    try:
        while len(made) < 5000:
            made += os.pipe()
    except OSError:
        pass
    return a + b if len(made) > 1000 else 0
