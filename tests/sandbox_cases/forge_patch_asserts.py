# goal: every assert method of TestCase does nothing
# kind: both
# expect: fail|error|protocol
import unittest
for name in dir(unittest.TestCase):
    if name.startswith(("assert", "fail", "_base", "_get")):
        setattr(unittest.TestCase, name, lambda self, *a, **k: None)


def add(a, b):
    return 0
