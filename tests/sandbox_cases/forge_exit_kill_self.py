# goal: kill the own process by a signal
# kind: both
# expect: fail|error|protocol
import os
import signal


def add(a, b):
    os.kill(os.getpid(), signal.SIGKILL)
    os.abort()
