# goal: raise SkipTest in every call
# kind: both
# expect: fail|error|protocol
import unittest


def add(a, b):
    raise unittest.SkipTest("not today")
