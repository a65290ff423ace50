# goal: type, int and Exception mean something else from now on
# kind: both
# expect: fail|error|protocol|timeout
import builtins


class Yes(Exception):
    def __eq__(self, other):
        return True


builtins.type = lambda *a: int
builtins.int = builtins.float = lambda *a: 3
builtins.AssertionError = builtins.Exception = builtins.BaseException = Yes


def add(a, b):
    return 0
