# goal: break the channel in tests that only expect some exception
# kind: unittest
# tests: refuse
# expect: fail|error|protocol|timeout
import os


def root(n):
    for fd in range(3, 16):
        try:
            os.write(fd, b"\x00\x00\x00\x02{]" * 3)
        except OSError:
            pass
    os._exit(0)
