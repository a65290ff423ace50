# goal: an object whose difference to everything is 0, for assertAlmostEqual
# kind: both
# tests: half
# expect: fail|error|protocol
class Near:
    def __sub__(self, other):
        return 0.0

    __rsub__ = __abs__ = __round__ = __float__ = lambda self, *a: 0.0

    def __le__(self, other):
        return True

    __lt__ = __ge__ = __gt__ = __eq__ = __le__


def half(x):
    return Near()
