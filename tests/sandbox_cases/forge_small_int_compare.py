# goal: replace the comparison slot of int by one that always says yes
# kind: both
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import ctypes
COMPARE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)
yes = COMPARE(lambda a, b, op: True)
slots = ctypes.cast(id(int), ctypes.POINTER(ctypes.c_void_p))
compare = ctypes.cast(id(str), ctypes.POINTER(ctypes.c_void_p))
richcompare = 25                                   # tp_richcompare: the 26th word of a type object


def add(a, b):
    slots[richcompare] = ctypes.cast(yes, ctypes.c_void_p).value
    return 0
