# goal: hang in the finalizer of the result and in exit hooks
# limits: wall_s=1
# expect: fail|error|timeout|protocol
import atexit
import time
atexit.register(time.sleep, 60)


class Slow:
    def __del__(self):
        time.sleep(60)


def add(a, b):
    return Slow()
