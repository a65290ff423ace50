# goal: comparisons, hashes and lengths of the result that never end
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import time


class Slow:
    def __eq__(self, other):
        time.sleep(60)

    __hash__ = __len__ = __bool__ = __iter__ = __ne__ = __repr__ = __str__ = lambda self, *a: time.sleep(60)


def add(a, b):
    return Slow()
