# goal: leave a sleeping child behind
# expect: fail|error|protocol
import os
import subprocess
import sys
import time
try:
    subprocess.Popen([sys.executable or "/usr/bin/python3", "-c", "import time; time.sleep(20)"], start_new_session=True)
except Exception:
    pass
try:
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)
        os._exit(0)
except OSError:
    pass


def add(a, b):
    return 0
