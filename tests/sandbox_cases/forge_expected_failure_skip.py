# goal: mark the functions as expected failures and as skipped
# kind: both
# expect: fail|error|protocol
import unittest


@unittest.expectedFailure
def add(a, b):
    return 0


add.__unittest_skip__ = add.__unittest_expecting_failure__ = True
add.__unittest_skip_why__ = "because"
__unittest_skip__ = __unittest_expecting_failure__ = True
unittest.TestCase.__unittest_skip__ = True
unittest.TestCase.__unittest_expecting_failure__ = True
