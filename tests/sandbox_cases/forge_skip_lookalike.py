# goal: an own exception class that has the name and module of unittest's SkipTest
# kind: both
# expect: fail|error|protocol
class SkipTest(Exception):
    pass


SkipTest.__module__ = "unittest.case"
SkipTest.__qualname__ = "SkipTest"


def add(a, b):
    raise SkipTest("not today")
