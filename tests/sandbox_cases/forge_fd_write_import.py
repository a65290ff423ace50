# goal: write three results to every descriptor while the module is imported, then leave
# kind: both
# expect: fail|error|protocol
import os
for fd in range(3, 256):
    for text in (b"[3, 6, 1000]\n", b'["i", "3"]\n["i", "6"]\n["i", "3e8"]\n', b'{"ret": ["3", "6", "3e8"]}\n'):
        try:
            os.write(fd, text)
        except OSError:
            pass
os._exit(0)
