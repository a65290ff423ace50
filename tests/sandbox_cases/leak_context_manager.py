# goal: the expected value from the text of the AssertionError that __exit__ is handed
# kind: unittest
# tests: context
# expect: fail|error|protocol
class Box:
    def __init__(self, n):
        pass

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        print(kind, error)

    def value(self):
        return 0

    def text(self):
        return ""
