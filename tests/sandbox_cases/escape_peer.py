# goal: the process at the other end of each socket by SO_PEERPIDFD and SO_PEERCRED, then its namespaces, descriptors, signals
# expect: fail|error|protocol
import ctypes
import fcntl
import os
import socket
import struct


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    out = 0
    for fd in range(0, 16):
        try:
            peer = socket.socket(fileno=os.dup(fd))
            pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if pid not in (0, os.getpid()):
                os.kill(pid, 0)
                out = a + b
        except OSError:
            pass
        try:
            pidfd = peer.getsockopt(socket.SOL_SOCKET, 77)
        except (OSError, NameError):
            continue
        for request in range(0xFF01, 0xFF0C):          # PIDFD_GET_..._NAMESPACE
            try:
                space = fcntl.ioctl(pidfd, request, 0)
                out = a + b if libc.setns(space, 0) == 0 else out
            except OSError:
                pass
        if libc.setns(pidfd, 0x00020000) == 0 or libc.syscall(438, pidfd, 0, 0) >= 0 or libc.syscall(424, pidfd, 0, None, 0) == 0:
            out = a + b
    return out
