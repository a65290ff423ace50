# goal: a float whose difference to everything is 0
# kind: both
# tests: half
# expect: fail|error|protocol
class Near(float):
    def __sub__(self, other):
        return 0.0

    __rsub__ = __abs__ = __round__ = lambda self, *a: 0.0

    def __le__(self, other):
        return True

    __lt__ = __ge__ = __gt__ = __eq__ = __le__
    __hash__ = float.__hash__


def half(x):
    return Near(99.0)
