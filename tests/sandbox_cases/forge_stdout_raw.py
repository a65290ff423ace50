# goal: write report lines to descriptors 1 and 2, past Python's streams
# kind: both
# expect: fail|error|protocol
import os


def add(a, b):
    for fd in (1, 2):
        os.write(fd, b"\n{\"status\": \"pass\"}\nOK\n\x00\x00\x00\x02[]")
    return 0
