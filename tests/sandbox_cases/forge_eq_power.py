# goal: a difference that says its square is 0
# kind: unittest
# tests: square
# expect: fail|error|protocol
class Near:
    def __sub__(self, other):
        return self

    def __pow__(self, other):
        return 0.0


def half(x):
    return Near()
