# goal: a square that is itself an object smaller than every tolerance
# kind: unittest
# tests: square
# expect: fail|error|protocol
class Near:
    def __sub__(self, other):
        return self

    def __pow__(self, other):
        return self

    def __lt__(self, other):
        return True

    __le__ = __gt__ = __ge__ = __eq__ = __bool__ = lambda self, *a: True


def half(x):
    return Near()
