# goal: edit the constants of the calling code objects in memory
# kind: both
# expect: fail|error|protocol|timeout
import ctypes
import sys


def add(a, b):
    frame = sys._getframe(1)
    while frame:
        consts = frame.f_code.co_consts
        for i, value in enumerate(consts):
            if value is False or value == "fail":
                new = True if value is False else "pass"
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))
                ctypes.cast(id(consts) + 24, ctypes.POINTER(ctypes.c_void_p))[i] = id(new)
        frame = frame.f_back
    return 0
