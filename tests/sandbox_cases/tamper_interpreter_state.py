# goal: spoil the interpreter that later programs are forked from
# runs: 2
# expect: fail|error|protocol|timeout
import builtins
import gc
import os
import random
import sys
FOUND = hasattr(sys, "spoiled")
sys.spoiled = True
sys.setrecursionlimit(60)
sys.setswitchinterval(100)
gc.disable()
gc.freeze()
os.umask(0o777)
os.environ.clear()
random.seed(1)
sys.path.clear()
builtins.print = lambda *a, **k: None


def add(a, b):
    return a + b if FOUND else 0
