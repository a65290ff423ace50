# goal: names of the host's files
# kind: both
# tests: canary
# expect: fail|error|protocol
import glob
import os


def read():
    names = []
    for folder in ("@DIR@", os.path.dirname("@DIR@"), "/home", "/root", "/etc", "/var/log", "."):
        try:
            names += os.listdir(folder)
        except OSError:
            pass
    names += glob.glob("/tmp/sandbox-host-*/*")
    if any("canary" in name or "sandbox-host" in name for name in names):
        while True:
            print("the host's folder is open to readers", names)
            break
        return open("@CANARY@").read()
