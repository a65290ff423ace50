# goal: end the process with status 0 in the first call
# kind: both
# expect: fail|error|protocol
import os


def add(a, b):
    os._exit(0)
