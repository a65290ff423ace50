# goal: leave a thread that writes to the channel after the verdict
# expect: fail|error|protocol|timeout
import os
import threading
import time


def later():
    while True:
        for fd in range(1, 32):
            try:
                os.write(fd, b'{"status": "pass"}\n')
            except OSError:
                pass
        time.sleep(0.001)


threading.Thread(target=later, daemon=True).start()


def add(a, b):
    return 0
