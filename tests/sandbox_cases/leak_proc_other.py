# goal: list the host's processes
# kind: both
# tests: canary
# expect: fail|error|protocol
import os


def read():
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit() and int(name) not in (os.getpid(), 1):
            try:
                data = open(f"/proc/{name}/environ", "rb").read()
            except OSError:
                continue
            at = data.find(b"canary-")
            if at >= 0:
                print(data[at:at + 31].decode())
                return data[at:at + 31].decode()
