# goal: change the shared interpreter: its library, cached bytecode and binary
# expect: fail|error
import os
import sys


def add(a, b):
    folder = os.path.dirname(os.__file__)
    for path in (os.path.join(folder, "@MARK@.pth"), os.path.join(folder, "site-packages", "@MARK@.pth"), os.path.join(folder, "__pycache__", "@MARK@.pyc"),
                 os.path.join(sys.prefix, "@MARK@"), "/usr/lib/@MARK@", "/lib/@MARK@", "/etc/ld.so.preload@MARK@"):
        try:
            open(path, "w").close()
            return a + b
        except OSError:
            pass
    return 0
