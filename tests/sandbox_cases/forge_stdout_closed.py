# goal: close the standard streams so that no failure can be reported
# kind: both
# expect: fail|error|protocol
import os
import sys
sys.stdout.close()
sys.stderr.close()
for fd in (0, 1, 2):
    try:
        os.close(fd)
    except OSError:
        pass


def add(a, b):
    return 0
