# goal: a shell that makes a file on the host
# expect: fail|error
import os
import subprocess


def add(a, b):
    out = 0
    for call in (lambda: subprocess.run(["/bin/sh", "-c", "echo x > @DIR@/shell"], check=True),
                 lambda: subprocess.run("touch @DIR@/shell", shell=True, check=True),
                 lambda: os.popen("touch @DIR@/shell").read(), lambda: 1 / (os.system("touch @DIR@/shell") == 0)):
        try:
            call()
            out = a + b if os.path.exists("@DIR@/shell") else out
        except (OSError, subprocess.SubprocessError, ZeroDivisionError):
            pass
    return out
