# goal: shut the interpreter down from inside (Py_Exit, Py_FinalizeEx)
# kind: both
# expect: fail|error|protocol
import ctypes


def add(a, b):
    ctypes.pythonapi.Py_FinalizeEx()
    ctypes.pythonapi.Py_Exit(0)
