# goal: TestCase.assertEqual compares nothing
# kind: both
# expect: fail|error|protocol
import unittest


def nothing(self, first, second, msg=None):
    return None


unittest.case.TestCase.assertEqual = nothing
unittest.case.TestCase._getAssertEqualityFunc = lambda self, *a: nothing


def add(a, b):
    return None
