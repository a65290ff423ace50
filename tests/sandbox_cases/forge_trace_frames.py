# goal: a trace function rewrites the local variables of the frames that called
# kind: both
# expect: fail|error|protocol|timeout
import ctypes
import sys


def tracer(frame, event, arg):
    for key in list(frame.f_locals):
        if key in ("got", "value", "result", "ret", "out"):
            frame.f_locals[key] = 3
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return tracer


def add(a, b):
    frame = sys._getframe(1)
    while frame:
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(tracer)
    return 0
