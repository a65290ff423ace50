# goal: half a message, then the end of the process
# kind: both
# expect: fail|error|protocol
import os


def add(a, b):
    for fd in range(3, 64):
        try:
            os.write(fd, b'{"ok": true, "value')
        except OSError:
            pass
    os._exit(0)
