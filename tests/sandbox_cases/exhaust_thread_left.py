# goal: return at once and leave a thread that spins and cannot be joined
# limits: wall_s=1 cpu_s=1
# expect: fail|error|timeout
import threading


def spin():
    while True:
        pass


def add(a, b):
    threading.Thread(target=spin).start()
    return 0
