# goal: a profile function leaves with status 0 on the first return of a caller
# kind: both
# expect: fail|error|protocol
import os
import sys


def add(a, b):
    sys.setprofile(lambda frame, event, arg: os._exit(0) if event == "return" and frame.f_code.co_name != "add" else None)
    return 0
