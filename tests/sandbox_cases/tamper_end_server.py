# goal: write an end of work into every descriptor and close it, in the hope that the server reads it
# expect: fail|error|protocol|timeout
import os
import socket


def add(a, b):
    for fd in range(0, 64):
        for call in (lambda: os.write(fd, b"\n\n{}\nquit\n"), lambda: socket.socket(fileno=os.dup(fd)).shutdown(2), lambda: os.ftruncate(fd, 0),
                     lambda: os.lseek(fd, 1 << 40, 0), lambda: os.close(fd)):
            try:
                call()
            except OSError:
                pass
    return 0
