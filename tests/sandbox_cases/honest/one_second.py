# test: [] -> 1
# expect: pass
import time


def f():
    time.sleep(1)
    return 1
