# goal: have the kernel send a signal to the server: ownership of descriptors (F_SETOWN, F_SETSIG, FIOSETOWN)
# expect: fail|error|protocol
import fcntl
import os
import signal
import socket
import struct
signal.signal(signal.SIGIO, signal.SIG_IGN)


def add(a, b):
    for pid in (os.getppid(), int("@PID@"), -os.getppid()):
        if pid in (0, os.getpid()):
            continue
        one, two = socket.socketpair()
        read, write = os.pipe()
        for fd, poke in ((one.fileno(), lambda: two.send(b"x")), (read, lambda: os.write(write, b"x"))):
            for number in (0, signal.SIGKILL):
                try:
                    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
                    fcntl.fcntl(fd, 15, struct.pack("ii", 1, pid))
                    fcntl.fcntl(fd, 10, number)
                    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
                    poke()
                except OSError:
                    pass
    return 0
