# goal: a difference that prints as 0
# kind: unittest
# tests: text
# expect: fail|error|protocol
class Near:
    def __sub__(self, other):
        return self

    def __format__(self, spec):
        return "0.000"

    def __str__(self):
        return "0.0"


def half(x):
    return Near()
