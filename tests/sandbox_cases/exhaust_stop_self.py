# goal: stop the own process, so that it neither ends nor uses time
# limits: wall_s=1
# expect: timeout|fail|error|protocol
import os
import signal


def add(a, b):
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0
