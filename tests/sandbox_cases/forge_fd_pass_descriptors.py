# goal: send open descriptors over the channel to whoever reads it
# kind: both
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout
import array
import os
import socket


def add(a, b):
    for fd in range(3, 64):
        try:
            peer = socket.socket(fileno=os.dup(fd))
            peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        except OSError:
            pass
    return 0
