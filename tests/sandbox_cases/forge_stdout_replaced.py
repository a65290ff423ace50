# goal: standard streams become objects that answer everything with success
# kind: both
# expect: fail|error|protocol
import sys


class Yes:
    def __getattr__(self, name):
        return lambda *a, **k: self

    def __eq__(self, other):
        return True

    def __str__(self):
        return "OK"


sys.stdout = sys.stderr = sys.stdin = sys.__stdout__ = sys.__stderr__ = Yes()


def add(a, b):
    return 0
