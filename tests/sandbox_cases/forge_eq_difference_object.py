# goal: a difference that is itself an object smaller than every delta
# kind: both
# tests: half
# expect: fail|error|protocol
class Small:
    def __call__(self, *a):
        return self

    __sub__ = __rsub__ = __abs__ = __round__ = __add__ = __radd__ = __mul__ = __rmul__ = __neg__ = __call__

    def __eq__(self, other):
        return True

    __le__ = __lt__ = __ge__ = __gt__ = __bool__ = lambda self, *a: True


def half(x):
    return Small()
