# goal: become /bin/true, which exits with 0
# kind: both
# expect: fail|error|protocol
import os
import sys


def add(a, b):
    for path in ("/bin/true", "/usr/bin/true", sys.executable or "/usr/bin/python3"):
        try:
            os.execv(path, [path, "-c", "pass"])
        except (OSError, ValueError):
            pass
    return 0
