# goal: say "ok" from an exit hook and end with status 0 although a call raised
# kind: both
# expect: fail|error|protocol
import atexit
import os


@atexit.register
def leave():
    print("OK\n3 passed", flush=True)
    os._exit(0)


def add(a, b):
    raise ValueError("no")
