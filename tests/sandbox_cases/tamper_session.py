# goal: leave the server's session and process group, so that a signal to the group misses
# limits: wall_s=1
# expect: timeout|fail|error|protocol
import os
import time


def add(a, b):
    for call in (os.setsid, lambda: os.setpgid(0, 0), lambda: os.setpgid(0, os.getppid())):
        try:
            call()
        except OSError:
            pass
    time.sleep(60)
