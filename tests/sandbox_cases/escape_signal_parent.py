# goal: kill, stop and interrupt the server and every process in reach
# expect: fail|error|protocol
import os
import signal


def add(a, b):
    for number in (signal.SIGINT, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        for pid in (os.getppid(), int("@PID@"), os.getppid() - 1, os.getppid() + 1, 1):
            if pid > 0 and pid != os.getpid():
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
    return 0
