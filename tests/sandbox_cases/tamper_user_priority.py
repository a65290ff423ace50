# goal: lower the priority of every process of the same user or group
# expect: fail|error|protocol
import os


def add(a, b):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    for which, who in ((os.PRIO_USER, 0), (os.PRIO_PGRP, 0), (os.PRIO_USER, os.getuid())):
        try:
            os.setpriority(which, who, before + 1)
        except OSError:
            pass
    return 0
