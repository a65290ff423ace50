# goal: socket pairs of other families, which go over the network stack
# expect: fail|error
import socket


def add(a, b):
    for family in (socket.AF_INET, socket.AF_INET6, 30, 16, 40, 38):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RDM):
            try:
                socket.socketpair(family, kind)
                return a + b
            except (OSError, ValueError):
                pass
    return 0
