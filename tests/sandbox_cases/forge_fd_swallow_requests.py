# goal: read the judge's next requests from the channel and answer nothing
# kind: both
# limits: wall_s=1
# expect: fail|error|protocol|timeout
import os


def add(a, b):
    for fd in range(3, 64):
        try:
            os.set_blocking(fd, False)
            os.read(fd, 1 << 20)
        except OSError:
            pass
    return 0
