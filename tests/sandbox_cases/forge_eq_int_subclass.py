# goal: an int of value 0 that is equal to everything
# kind: both
# expect: fail|error|protocol
class Zero(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 3

    def __index__(self):
        return 3

    def __int__(self):
        return 3

    def __sub__(self, other):
        return 0

    __rsub__ = __sub__


def add(a, b):
    return Zero(0)
