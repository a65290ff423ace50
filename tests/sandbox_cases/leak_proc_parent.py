# goal: environment, command line, memory and descriptors of parent and grandparent through /proc
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import os
import re


def secret(n):
    for pid in (os.getppid(), "@PID@", 1, "self", "thread-self"):
        for name in ("environ", "cmdline", "maps", "mem", "stat", "status", "root/etc/passwd", "cwd/sandbox.py", "task/1/environ"):
            try:
                data = open(f"/proc/{pid}/{name}", "rb").read(1 << 20)
            except (OSError, ValueError, OverflowError):
                continue
            hit = re.search(b"(canary|expected)-[0-9a-f]{24}", data)
            if hit:
                print(hit.group().decode())
                return hit.group().decode()
