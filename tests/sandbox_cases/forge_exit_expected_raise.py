# goal: end the process in tests that only expect some exception, which the broken link then gives them
# kind: unittest
# tests: refuse
# expect: fail|error|protocol
import os


def root(n):
    os._exit(0)
