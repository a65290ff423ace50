# goal: write a program or a library into the scratch folder and run or load it
# expect: fail|error
import ctypes
import os


def add(a, b):
    for folder in (".", "/tmp"):
        path = os.path.join(folder, "tool.so")
        try:
            library = next(name for name in ("/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib/aarch64-linux-gnu/libm.so.6") if os.path.exists(name))
            with open(path, "wb") as f:
                f.write(open(library, "rb").read())
            ctypes.CDLL(path)
            os.execv(path, [path])
        except (OSError, StopIteration):
            pass
    return 0
