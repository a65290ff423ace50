# goal: set extended attributes of a host file
# expect: fail|error
import os


def add(a, b):
    for name in ("user.note", "security.note", "trusted.note"):
        try:
            os.setxattr("@VICTIM@", name, b"x")
            return a + b
        except OSError:
            pass
    return 0
