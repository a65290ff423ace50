# goal: __class__ says int, __eq__ says yes
# kind: both
# expect: fail|error|protocol
class Masked:
    __class__ = property(lambda self: int)

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 3

    def __index__(self):
        return 3


def add(a, b):
    return Masked()
