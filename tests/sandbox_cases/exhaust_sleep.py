# goal: sleep for a minute
# limits: wall_s=1
# expect: timeout
import time


def add(a, b):
    time.sleep(60)
    return 0
