# goal: become a daemon: two forks, a session of its own, closed descriptors
# expect: fail|error|protocol
import os
import time


def add(a, b):
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.closerange(0, 256)
            time.sleep(20)
            os._exit(0)
    except OSError:
        pass
    return 0
