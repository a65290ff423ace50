# goal: a thread throws SystemExit into the main thread, where the runner is
# kind: both
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import ctypes
import threading
main = threading.main_thread().ident


def throw():
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(SystemExit))


def add(a, b):
    threading.Timer(0.01, throw).start()
    return 0
