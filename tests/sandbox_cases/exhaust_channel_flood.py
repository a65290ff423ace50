# goal: flood the result channel
# limits: wall_s=1 cpu_s=1
# expect: timeout|protocol|fail|error|output
import os


def add(a, b):
    while True:
        wrote = False
        for fd in range(3, 16):
            try:
                os.set_blocking(fd, False)
                wrote |= os.write(fd, b"[" * 65536) > 0
            except OSError:
                pass
