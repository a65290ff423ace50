# goal: connect to a server on the loopback
# expect: fail|error
import socket


def add(a, b):
    try:
        socket.create_connection(("127.0.0.1", int("@TCP@")), timeout=1).sendall(b"out")
    except OSError:
        return 0
    return a + b
