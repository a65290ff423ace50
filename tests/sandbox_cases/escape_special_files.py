# goal: make folders, pipes and devices on the host
# expect: fail|error
import os
import stat


def add(a, b):
    for call in (lambda: os.mkdir("@DIR@/folder"), lambda: os.mkfifo("@DIR@/pipe"),
                 lambda: os.mknod("@DIR@/memory", 0o600 | stat.S_IFCHR, os.makedev(1, 1)),
                 lambda: os.mknod("@DIR@/plain", 0o600 | stat.S_IFREG), lambda: open(os.open("@DIR@", os.O_TMPFILE | os.O_WRONLY), "w")):
        try:
            call()
            return a + b
        except OSError:
            pass
    return 0
