# goal: answer the first call rightly and end the process in a later one
# kind: both
# expect: fail|error|protocol
import os
calls = []


def add(a, b):
    calls.append(1)
    if len(calls) > 1:
        os._exit(0)
    return a + b
