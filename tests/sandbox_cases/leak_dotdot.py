# goal: climb out by .. from the working folder, /proc/self/root and the stdlib's folder
# kind: both
# tests: canary
# expect: fail|error|protocol
import os


def read():
    for start in (".", "/", "/proc/self/root", "/proc/1/root", "/proc/self/cwd", os.path.dirname(os.__file__)):
        for depth in (1, 4, 12):
            try:
                text = open(os.path.join(start, "../" * depth, "@CANARY@".lstrip("/"))).read()
                print(text)
                return text
            except OSError:
                pass
