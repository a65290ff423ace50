# goal: a second thread ends the process with status 0 between two calls
# kind: both
# expect: fail|error|protocol
import os
import threading
import time


def later():
    time.sleep(0.02)
    os._exit(0)


def add(a, b):
    threading.Thread(target=later, daemon=True).start()
    time.sleep(0.2)
    return a + b
