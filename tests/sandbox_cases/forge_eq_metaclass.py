# goal: return a class whose metaclass makes it equal to everything and an instance of int
# kind: both
# expect: fail|error|protocol
class Meta(type):
    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return 3

    def __instancecheck__(cls, other):
        return True


class Three(metaclass=Meta):
    pass


def add(a, b):
    return Three
