# goal: connect to a socket file of the host
# expect: fail|error
import socket


def add(a, b):
    try:
        socket.socket(socket.AF_UNIX).connect("@UNIX@")
    except OSError:
        return 0
    return a + b
