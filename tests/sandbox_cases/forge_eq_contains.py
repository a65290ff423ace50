# goal: a container that holds everything it is asked for
# kind: unittest
# tests: member
# expect: fail|error|protocol
class Has:
    def __contains__(self, item):
        return True

    def __eq__(self, other):
        return True


def evens(n):
    return Has()
