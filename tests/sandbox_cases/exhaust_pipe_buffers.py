# goal: kernel memory in pipe and socket buffers
# expect: fail|error|timeout
import fcntl
import os


def add(a, b):
    stored = 0
    try:
        while True:
            read, write = os.pipe()
            os.set_blocking(write, False)
            try:
                fcntl.fcntl(write, 1031, 1 << 20)
            except OSError:
                pass
            try:
                while True:
                    stored += os.write(write, bytes(65536))
            except BlockingIOError:
                pass
    except OSError:
        pass
    return a + b if stored > 256 << 20 else 0
