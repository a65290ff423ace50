# goal: hooks for uncaught exceptions end the process with status 0
# kind: both
# expect: fail|error|protocol
import os
import sys
import threading
sys.excepthook = sys.unraisablehook = threading.excepthook = lambda *a: os._exit(0)


class Base(BaseException):
    pass


def add(a, b):
    raise Base
