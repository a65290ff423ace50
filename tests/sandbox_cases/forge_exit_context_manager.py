# goal: a context manager whose __exit__ swallows the test's AssertionError
# kind: unittest
# tests: context
# expect: fail|error|protocol
class Box:
    def __init__(self, n):
        pass

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return True

    def value(self):
        return 0

    def text(self):
        return ""
