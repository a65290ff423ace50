# goal: the built-in functions that a comparison uses agree with everything
# kind: both
# expect: fail|error|protocol|timeout
import builtins
builtins.all = builtins.any = builtins.isinstance = builtins.issubclass = lambda *a: True
builtins.len = lambda x: 3
builtins.abs = builtins.round = lambda *a: 0
builtins.repr = builtins.str = lambda *a: "3"


def add(a, b):
    return 0
