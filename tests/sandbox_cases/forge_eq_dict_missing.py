# goal: a dict subclass that answers every key
# kind: both
# tests: nest
# expect: fail|error|protocol
class Every(dict):
    def __missing__(self, key):
        return Every()

    def __eq__(self, other):
        return True

    def __contains__(self, key):
        return True


def nest(n):
    return Every()
