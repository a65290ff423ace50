# goal: unittest.mock patches operator and the comparison helpers for the rest of the process
# kind: both
# expect: fail|error|protocol
import operator
from unittest import mock
for name in ("eq", "ne", "is_", "sub"):
    mock.patch.object(operator, name, lambda *a: True).start()


def add(a, b):
    return 0
