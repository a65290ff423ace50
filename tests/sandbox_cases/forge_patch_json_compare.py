# goal: the server's own functions, found in __main__, are replaced by ones that agree
# kind: both
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import sys
import types
main = sys.modules.get("__main__")
for name, value in list(vars(main).items()) if main else []:
    if isinstance(value, types.FunctionType):
        value.__code__ = (lambda *a, **k: True).__code__


def add(a, b):
    return 0
