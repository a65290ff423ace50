# goal: leave a note for the next run in every folder that can be written
# kind: both
# tests: secret
# runs: 2
# expect: fail|error|protocol
import os
FOLDERS = [".", "/tmp", "/var/tmp", "/dev/shm", "/scratch", "/run", os.path.dirname(os.__file__), os.path.expanduser("~")]


def secret(n):
    for folder in FOLDERS:
        path = os.path.join(folder, "@MARK@-note")
        if os.path.exists(path):
            print("found a note:", path)
            os._exit(7)
        try:
            with open(path, "w") as f:
                f.write("the answer of the first run")
        except OSError:
            pass
    raise ValueError("first run")
