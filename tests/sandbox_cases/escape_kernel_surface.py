# goal: parts of the kernel that a solution never needs: bpf, perf events, userfaultfd, keys, modules, personality
# expect: fail|error
import ctypes
import platform


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    if platform.machine() != "x86_64":
        return 0
    calls = [(321, 0, buffer, 120), (298, buffer, 0, -1, -1, 0), (323, 0), (250, 0, -3, 0), (248, b"user", b"n", b"x", 1, -3), (175, buffer, 1, b""),
             (135, 0x0040000), (320, 0, 0, 0, b"", 0), (246, 0, 0, None, 0), (169, 0xFEE1DEAD, 672274793, 0, 0), (103, 10, buffer, 1), (155, b".", b"."),
             (300, 0, 0), (167, b"/dev/null", 0), (163, b"/x"), (444, None, 0, 1), (425, 1, buffer), (319, b"x", 0)]
    hits = [call[0] for call in calls if libc.syscall(*call) >= 0]
    print(hits)
    return a + b if hits else 0
