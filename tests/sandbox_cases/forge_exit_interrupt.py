# goal: raise KeyboardInterrupt and other BaseException classes at every call
# kind: both
# expect: fail|error|protocol
class Quiet(BaseException):
    pass


kinds = [KeyboardInterrupt, GeneratorExit, Quiet]


def add(a, b):
    raise kinds.pop(0)
