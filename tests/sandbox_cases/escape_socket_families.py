# goal: any other family of sockets: netlink, packet, raw, vsock, Bluetooth, kernel crypto
# expect: fail|error
import socket


def add(a, b):
    for family, kind, number in ((16, 3, 0), (17, 3, 768), (2, 3, 1), (40, 1, 0), (31, 3, 1), (38, 5, 0), (29, 3, 1), (44, 3, 0)):
        try:
            socket.socket(family, kind, number)
            return a + b
        except OSError:
            pass
    return 0
