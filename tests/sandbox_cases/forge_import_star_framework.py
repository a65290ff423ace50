# goal: the names unittest, HiddenTest, load_tests and setUpModule through `from solution import *`
# kind: unittest
# tests: star
# expect: fail|error|protocol
import unittest as real


class unittest:
    class TestCase(real.TestCase):
        def assertEqual(self, *a):
            pass


class HiddenTest(unittest.TestCase):
    def test_sorted(self):
        pass

    def test_length(self):
        pass


def load_tests(loader, tests, pattern):
    return real.defaultTestLoader.loadTestsFromTestCase(HiddenTest)


def setUpModule():
    raise real.SkipTest("all of it")


def evens(n):
    return []
