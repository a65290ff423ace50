# goal: TestResult forgets its failures
# kind: both
# expect: fail|error|protocol
import unittest
result = unittest.TestResult
result.addFailure = result.addError = result.addSkip = result.addSubTest = lambda self, *a: self.addSuccess(None)
result.wasSuccessful = lambda self: True
result.failures = result.errors = property(lambda self: [], lambda self, value: None)


def add(a, b):
    return 0
