# goal: an endless generator and an endless container as results
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import itertools


class Endless(list):
    def __iter__(self):
        return itertools.count()


values = [itertools.count(), Endless([1]), iter(int, 1)]


def add(a, b):
    return values.pop()
