# goal: numbers of a million digits on the channel, which take long to read
# expect: fail|error|protocol|output
import os


def add(a, b):
    for number in (b"9" * 900_000 + b".5", b"0." + b"1" * 900_000, b"1e-" + b"9" * 900_000):
        for fd in range(3, 8):
            try:
                os.set_blocking(fd, False)
                os.write(fd, b'["v", ' + number + b"]\n")
            except OSError:
                pass
    return 0
