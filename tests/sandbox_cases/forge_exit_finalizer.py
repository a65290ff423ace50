# goal: the returned value's __del__ ends the process with status 0
# kind: both
# expect: fail|error|protocol
import os


class Bomb:
    def __del__(self):
        os._exit(0)


def add(a, b):
    return Bomb()
