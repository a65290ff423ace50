# goal: shut the channel's other direction down if it is a socket
# kind: both
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import os
import socket


def add(a, b):
    for fd in range(3, 64):
        try:
            socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RD)
        except OSError:
            pass
    return 0
