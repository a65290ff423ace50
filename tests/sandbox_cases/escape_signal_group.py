# goal: signals to process groups and to everybody
# expect: fail|error|protocol
import os
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)


def add(a, b):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        for call, target in ((os.kill, -1), (os.killpg, os.getpgrp()), (os.kill, 0), (os.killpg, os.getsid(0)), (os.kill, -os.getppid() or -1)):
            try:
                call(target, number)
            except OSError:
                pass
    return 0
