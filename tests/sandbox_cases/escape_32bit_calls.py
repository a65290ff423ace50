# goal: fork and open the host's file by int 0x80, the 32-bit entry, from self-made machine code
# expect: fail|error|protocol
import ctypes
import mmap
import os
import platform


def add(a, b):
    if platform.machine() != "x86_64":
        return 0
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x53\xb8\x02\x00\x00\x00\xcd\x80\x5b\xc3")       # push rbx; mov eax, 2 (fork); int 0x80; pop rbx; ret
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    pid = run()
    if pid == 0:
        open("@DIR@/forked", "w").close()
        os._exit(0)
    return a + b if pid > 0 else 0
