# goal: a timer signal ends the process with status 0
# kind: both
# expect: fail|error|protocol
import os
import signal
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.05)


def add(a, b):
    while True:
        pass
