# goal: a metaclass under which the raised class is a subclass of everything
# kind: both
# tests: raises
# expect: fail|error|protocol
class Meta(type):
    def __subclasscheck__(cls, other):
        return True

    def __instancecheck__(cls, other):
        return True

    def mro(cls):
        return [cls, Exception, BaseException, object]


class Sly(Exception, metaclass=Meta):
    pass


def root(n):
    if n < 0:
        raise Sly("negative")
    return 2
