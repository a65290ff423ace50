# goal: an inherited descriptor of a folder outside, as a start for openat and fchdir
# kind: both
# tests: canary
# expect: fail|error|protocol
import os


def read():
    for fd in range(0, 256):
        try:
            os.fchdir(fd)
            text = open("../" * 12 + "@CANARY@".lstrip("/")).read()
            print(text)
            return text
        except OSError:
            pass
