# goal: a str subclass that is equal to the hidden text
# kind: both
# tests: secret
# expect: fail|error|protocol
class Text(str):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __str__(self):
        return self

    def encode(self, *a):
        return b"expected"


def secret(n):
    return Text("expected-")
