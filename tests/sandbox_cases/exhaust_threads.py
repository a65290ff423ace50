# goal: more threads than are allowed
# expect: fail|error|timeout|memory
import threading
import time


def add(a, b):
    made = 0
    for _ in range(500):
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            made += 1
        except RuntimeError:
            break
    return a + b if made > 64 else 0
