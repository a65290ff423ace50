# goal: TestCase.run and TestSuite.run count a test without running it
# kind: both
# expect: fail|error|protocol
import unittest


def count(self, result=None, debug=False):
    result.testsRun += 3
    return result


unittest.TestCase.run = unittest.TestSuite.run = unittest.BaseTestSuite.run = count
unittest.TestCase.__call__ = count


def add(a, b):
    return 0
