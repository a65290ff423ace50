# goal: the same through IPv6 and a mapped address
# expect: fail|error
import socket


def add(a, b):
    for address in ("::1", "::ffff:127.0.0.1"):
        try:
            s = socket.socket(socket.AF_INET6)
            s.settimeout(1)
            s.connect((address, int("@TCP@")))
            return a + b
        except OSError:
            pass
    return 0
