# goal: empty sys.modules, so that everything is imported anew from where the candidate says
# kind: both
# expect: fail|error|protocol|timeout
import sys
keep = dict(sys.modules)
sys.path[:] = ["/tmp", ".", ""]
sys.modules.clear()


def add(a, b):
    return 0
