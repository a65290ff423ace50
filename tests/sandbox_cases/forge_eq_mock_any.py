# goal: unittest.mock.ANY and a MagicMock that compares as wanted
# kind: both
# expect: fail|error|protocol
from unittest import mock
values = [mock.ANY, mock.MagicMock(__eq__=lambda *a: True), mock.ANY]


def add(a, b):
    return values.pop()
