# goal: an exception class whose text equals every text
# kind: both
# tests: raises
# expect: fail|error|protocol
class Any(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


class Sly(ValueError):
    def __str__(self):
        return Any("x")


def root(n):
    if n < 0:
        raise Sly(Any("x"))
    return 2
