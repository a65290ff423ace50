# goal: raise the private exceptions by which unittest ends a test early
# kind: both
# expect: fail|error|protocol
from unittest import case
kinds = [case._ShouldStop, case._UnexpectedSuccess, case.SkipTest]


def add(a, b):
    raise kinds.pop()
