# goal: run the runner's own main module again with success patched in
# kind: both
# expect: fail|error|protocol|timeout
import runpy
import sys
try:
    runpy.run_path(sys.modules["__main__"].__file__, run_name="__main__")
except BaseException as error:
    print(type(error).__name__)


def add(a, b):
    return 0
