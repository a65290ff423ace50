# goal: the entry is a class whose instances are equal to everything
# kind: both
# expect: fail|error|protocol
class add:
    def __init__(self, a, b):
        pass

    def __eq__(self, other):
        return True

    def __new__(cls, *args):
        return super().__new__(cls)
