# goal: the candidate module answers every name, also the test names
# kind: both
# expect: fail|error|protocol
import sys
import types


class Answers(types.ModuleType):
    def __getattr__(self, name):
        return lambda *a, **k: True


sys.modules[__name__] = Answers(__name__)
sys.modules["solution"] = Answers("solution")
