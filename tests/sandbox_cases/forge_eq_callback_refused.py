# goal: swallow the judge's refusal inside a function of the test, so that nothing is gathered
# kind: unittest
# tests: gather
# expect: fail
class Near:
    def __sub__(self, other):
        return 0.0

    __rsub__ = __sub__

    def __abs__(self):
        return 0.0


def each(items, visit):
    try:
        visit(Near())
    except BaseException:
        pass
