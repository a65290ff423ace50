# goal: send a datagram to the loopback
# expect: fail|error
import socket


def add(a, b):
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"out", ("127.0.0.1", int("@UDP@")))
    except OSError:
        return 0
    return a + b
