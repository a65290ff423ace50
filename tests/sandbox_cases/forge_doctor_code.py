# goal: give the calling functions another body
# kind: both
# expect: fail|error|protocol|timeout
import gc
import sys
import types


def add(a, b):
    codes, frame = set(), sys._getframe(1)
    while frame:
        codes.add(frame.f_code)
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and thing.__code__ in codes:
            thing.__code__ = (lambda *a, **k: {"status": "pass"}).__code__
    return 0
