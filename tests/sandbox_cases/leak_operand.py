# goal: the expected number as the other operand of a comparison or difference
# kind: unittest
# tests: near
# expect: fail|error|protocol
class Spy:
    def __call__(self, other=None, *more):
        print(other, *more)
        return self

    __sub__ = __rsub__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __add__ = __radd__ = __call__
    __mod__ = __rmod__ = __contains__ = __pow__ = __rpow__ = __abs__ = __round__ = __call__


def half(x):
    return Spy()
