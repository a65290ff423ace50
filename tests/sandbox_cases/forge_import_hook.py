# goal: builtins.__import__ hands out fakes
# kind: both
# expect: fail|error|protocol|timeout
import builtins


class Fake:
    def __getattr__(self, name):
        return lambda *a, **k: True


builtins.__import__ = lambda *a, **k: Fake()


def add(a, b):
    return 0
