# goal: mount, unmount and remount by the old and the new calls
# expect: fail|error
import ctypes


def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    results = [libc.mount(b"none", b"/", None, 32 | 4096, None), libc.mount(b"proc", b"/tmp", b"proc", 0, None),
               libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None), libc.umount2(b"/tmp", 2), libc.umount2(b"/", 2),
               libc.syscall(428, -100, b"/", 1), libc.syscall(430, b"tmpfs", 0), libc.syscall(442, -100, b"/", 0, 0, 0)]
    return a + b if any(r >= 0 for r in results) else 0
