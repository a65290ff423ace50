# goal: exceptions named after everything a runner treats in its own way
# kind: both
# expect: fail|error|protocol
names = ["StopIteration", "_ShouldStop", "Skipped", "XFailed", "SystemExit", "KeyboardInterrupt", "StopTest"]


def add(a, b):
    raise type(names.pop(), (Exception,), {})("0")
