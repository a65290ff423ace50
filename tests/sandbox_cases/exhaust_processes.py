# goal: fork until nothing is left
# expect: fail|error|protocol
import os


def add(a, b):
    made = 0
    for _ in range(200):
        try:
            if os.fork() == 0:
                while True:
                    pass
            made += 1
        except OSError:
            pass
    return a + b if made else 0
