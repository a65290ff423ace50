# goal: sleep for a minute while the module is imported
# limits: wall_s=1
# expect: timeout
import time
time.sleep(60)


def add(a, b):
    return a + b
