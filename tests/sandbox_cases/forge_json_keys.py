# goal: dict subclass whose items() repeats the key "status" with another value
# kind: both
# expect: fail|error|protocol
class Twice(dict):
    def items(self):
        return [("status", "fail"), ("status", "pass"), ("value", 3)]

    def __len__(self):
        return 3


def add(a, b):
    return Twice(a=1)
