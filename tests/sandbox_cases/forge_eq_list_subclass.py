# goal: an empty list that lies about length, elements and equality
# kind: both
# tests: nest
# expect: fail|error|protocol
class Lie(list):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([Lie()])

    def __getitem__(self, i):
        return Lie()


def nest(n):
    return Lie()
