# goal: turn one end of a datagram socketpair, which is allowed, to the host's sockets
# expect: fail|error
import socket


def add(a, b):
    out = 0
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        one, two = socket.socketpair(socket.AF_UNIX, kind)
        for address in ("\0@ABSTRACT@", "@UNIX@"):
            try:
                one.connect(address)
                out = a + b
            except OSError:
                pass
            try:
                two.sendto(b"out", address)
                out = a + b
            except OSError:
                pass
    return out
