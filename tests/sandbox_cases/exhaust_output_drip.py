# goal: a byte of output now and then, so that a deadline per read never comes
# limits: wall_s=1
# expect: timeout|output
import os
import time


def add(a, b):
    while True:
        os.write(1, b".")
        time.sleep(0.05)
