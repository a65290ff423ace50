# goal: no built-in function is left for the runner
# kind: both
# expect: fail|error|protocol|timeout
import builtins


def add(a, b):
    vars(builtins).clear()
    return 0
