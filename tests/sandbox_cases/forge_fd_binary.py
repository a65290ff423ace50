# goal: length-prefixed garbage in every byte order on every descriptor
# kind: both
# expect: fail|error|protocol|timeout
import os
import struct


def add(a, b):
    for fd in range(3, 256):
        for form in ("<I", ">I", "<Q", ">Q"):
            try:
                os.write(fd, struct.pack(form, 4) + b"true" + b"\xff\xfe\x00" + struct.pack(form, 2**31 - 1))
            except OSError:
                pass
    return 0
