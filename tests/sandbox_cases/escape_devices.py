# goal: use devices: memory, disks, terminals, kernel messages
# expect: fail|error
import os


def add(a, b):
    for name in ("mem", "kmem", "port", "kmsg", "tty", "console", "ptmx", "vda", "sda", "loop0", "fuse", "kvm", "net/tun"):
        try:
            os.open(f"/dev/{name}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
            return a + b
        except OSError:
            pass
    return 0
