# goal: another module in the place of unittest
# kind: both
# expect: fail|error|protocol
import sys
import types


class Fake(types.ModuleType):
    def __getattr__(self, name):
        return type(name, (), {"__init__": lambda self, *a, **k: None, "main": lambda *a, **k: None})


for name in ("unittest", "unittest.case", "unittest.loader", "unittest.result", "unittest.runner", "unittest.suite"):
    sys.modules[name] = Fake(name)


def add(a, b):
    return 0
