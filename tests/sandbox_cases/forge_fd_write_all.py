# goal: write a pass in JSON to every descriptor
# kind: both
# expect: fail|error|protocol|timeout
import os


def add(a, b):
    for fd in range(3, 256):
        try:
            os.write(fd, b'{"status": "pass", "passed": true, "per_test": [true, true, true]}\n')
        except OSError:
            pass
    return 0
