# goal: NUL bytes, blank lines and invalid UTF-8 before the answer
# kind: both
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import os


def add(a, b):
    for fd in range(3, 64):
        try:
            os.write(fd, b"\x00" * 9 + b"\n\n\xc3\x28\xed\xa0\x80\n")
        except OSError:
            pass
    return 0
