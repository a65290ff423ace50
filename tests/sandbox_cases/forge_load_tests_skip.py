# goal: a load_tests function and own passing test cases in the candidate module
# kind: both
# expect: fail|error|protocol
import unittest


class HiddenTest(unittest.TestCase):
    def test_0(self):
        pass

    test_1 = test_2 = test_0


def load_tests(loader, tests, pattern):
    return unittest.TestSuite([HiddenTest("test_0"), HiddenTest("test_1"), HiddenTest("test_2")])


def setUpModule():
    raise unittest.SkipTest("all")


def add(a, b):
    return 0
