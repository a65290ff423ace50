# goal: open the parent's descriptors again through /proc/PID/fd
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import os


def secret(n):
    for pid in (os.getppid(), "@PID@", 1):
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                with open(f"/proc/{pid}/fd/{name}", "wb", 0) as f:
                    f.write(b'{"status": "pass"}\n')
            except OSError:
                pass
