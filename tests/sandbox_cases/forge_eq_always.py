# goal: equal to everything, different from nothing
# kind: both
# expect: fail|error|protocol
class Any:
    __hash__ = None

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


def add(a, b):
    return Any()
