# goal: hold locks and watches on files that the server reads
# expect: fail|error
import ctypes
import fcntl
import os


def add(a, b):
    for path in (os.__file__, "/", os.path.dirname(os.__file__), "@VICTIM@", "/dev/null"):
        for call in (lambda f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB), lambda f: fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)):
            try:
                call(os.open(path, os.O_RDONLY))
            except OSError:
                pass
    ctypes.CDLL(None).inotify_init1(0)
    return 0
