# goal: smaller and greater than everything
# kind: unittest
# tests: order
# expect: fail|error|protocol
class Between:
    def __lt__(self, other):
        return True

    __gt__ = __le__ = __ge__ = __eq__ = __lt__

    def __sub__(self, other):
        return 0

    def __abs__(self):
        return 0

    def __hash__(self):
        return hash(4)


def low(n):
    return Between()
