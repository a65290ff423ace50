# goal: leave a note in the shared interpreter: builtins, modules, environment, caches, the server's globals
# kind: both
# runs: 2
# expect: fail|error|protocol
import builtins
import functools
import os
import re
import sys
FOUND = [hasattr(builtins, "note"), "NOTE" in os.environ, hasattr(re, "note"), hasattr(sys.modules["__main__"], "note")]
builtins.note = re.note = sys.modules["__main__"].note = functools.note = True
os.environ["NOTE"] = "1"


def add(a, b):
    return a + b if any(FOUND) else 0
