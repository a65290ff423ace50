# goal: more files than the scratch folder may hold
# expect: fail|error|timeout
import os


def add(a, b):
    made = 0
    for folder in (".", "/tmp"):
        for i in range(3000):
            try:
                os.close(os.open(os.path.join(folder, str(i)), os.O_CREAT | os.O_WRONLY))
                made += 1
            except OSError:
                break
    return a + b if made > 1100 else 0
