# goal: an object that the test must ask, which asks back, and so on
# kind: unittest
# tests: each
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
class Item:
    def __init__(self, visit):
        self.visit = visit

    def __eq__(self, other):
        self.visit(Item(self.visit))
        return self == other

    def __repr__(self):
        return repr(self) + str(self.visit(self))


def each(items, visit):
    for item in items:
        visit(Item(visit))
    return Item(visit)
