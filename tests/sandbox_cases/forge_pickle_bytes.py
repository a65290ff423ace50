# goal: pickled bytes on every descriptor, for a reader that unpickles
# kind: both
# expect: fail|error|protocol|timeout
import os
import pickle


class Reduce:
    def __reduce__(self):
        return exec, ("open('@DIR@/pickled', 'w').write('x')",)


def add(a, b):
    for fd in range(1, 64):
        try:
            os.write(fd, pickle.dumps(Reduce()) + b"\n")
        except OSError:
            pass
    return 0
