# goal: change the owner of a host file
# expect: fail|error
import os


def add(a, b):
    for user in (os.getuid(), 12345, 0):
        try:
            os.chown("@VICTIM@", user, user)
            return a + b
        except OSError:
            pass
    return 0
