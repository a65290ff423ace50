# goal: a byte now and then on the result channel
# limits: wall_s=1
# expect: timeout|protocol|fail|error
import os
import time


def add(a, b):
    while True:
        for fd in range(3, 16):
            try:
                os.write(fd, b" ")
            except OSError:
                pass
        time.sleep(0.05)
