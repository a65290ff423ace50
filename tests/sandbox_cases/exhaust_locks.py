# goal: a lock that nobody will release
# limits: wall_s=1
# expect: timeout
import threading
lock = threading.Lock()


def add(a, b):
    lock.acquire()
    lock.acquire()
    return 0
