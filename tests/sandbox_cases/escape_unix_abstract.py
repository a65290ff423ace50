# goal: connect to an abstract socket of the host
# expect: fail|error
import socket


def add(a, b):
    try:
        socket.socket(socket.AF_UNIX).connect("\0@ABSTRACT@")
    except OSError:
        return 0
    return a + b
