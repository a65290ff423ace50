# goal: ignore every signal that a limit may send, and go on
# limits: wall_s=1 cpu_s=1
# expect: timeout|error
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))


def add(a, b):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
