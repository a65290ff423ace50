# goal: handlers and masks that make the own process hard to end
# limits: wall_s=1
# expect: timeout|fail|error|protocol
import os
import signal
import time
for number in range(1, 65):
    try:
        signal.signal(number, lambda *a: None)
    except (OSError, ValueError):
        pass


def add(a, b):
    os.setpgid(0, 0) if os.getpgrp() != os.getpid() else None
    while True:
        time.sleep(60)
