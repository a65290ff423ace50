# goal: open a listening socket and connect to itself
# expect: fail|error
import socket


def add(a, b):
    try:
        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname(), timeout=1)
    except OSError:
        return 0
    return a + b
