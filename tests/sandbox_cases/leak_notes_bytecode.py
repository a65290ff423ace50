# goal: leave changed bytecode in the cache of the standard library
# kind: both
# runs: 2
# expect: fail|error|protocol
import importlib.util
import colorsys
found = hasattr(colorsys, "note")
try:
    path = importlib.util.cache_from_source(colorsys.__file__)
    with open(path, "r+b") as f:
        f.write(b"note")
except OSError:
    pass


def add(a, b):
    return a + b if found else 0
