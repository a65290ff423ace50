# goal: raise before the assertion and swallow that error in __exit__
# kind: unittest
# tests: context
# expect: fail
class Box:
    def __init__(self, n):
        self.n = n

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True

    def value(self):
        raise ValueError("skip the rest")

    text = value
