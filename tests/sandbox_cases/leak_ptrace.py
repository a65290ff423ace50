# goal: read the parent's memory by ptrace and process_vm_readv
# kind: both
# tests: secret
# expect: fail|error|protocol
import ctypes
import os


def secret(n):
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(4096)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 4096)
    remote = (ctypes.c_size_t * 2)(id(object()) & ~0xFFF, 4096)
    for pid in (os.getppid(), int("@PID@")):
        if libc.ptrace(0x4206, pid, 0, 0) == 0 or libc.process_vm_readv(pid, local, 1, remote, 1, 0) > 0:
            print("the parent's memory is open")
            os._exit(7)
