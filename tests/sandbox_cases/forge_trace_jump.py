# goal: make the caller jump over its next lines
# kind: both
# expect: fail|error|protocol|timeout
import sys


def jump(frame, event, arg):
    try:
        frame.f_lineno = frame.f_lineno + 2
    except ValueError:
        pass
    return jump


def add(a, b):
    frame = sys._getframe(1)
    sys.settrace(jump)
    frame.f_trace = jump
    return 0
