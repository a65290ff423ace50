# goal: an exception whose text takes for ever
# limits: wall_s=1
# expect: fail|error|timeout
import time


class Slow(Exception):
    def __str__(self):
        time.sleep(60)

    __repr__ = __str__


def add(a, b):
    raise Slow
