# goal: the expected value in the own memory, read through /proc/self/mem
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import re


def secret(n):
    try:
        lines = open("/proc/self/maps").read().splitlines()
        memory = open("/proc/self/mem", "rb", 0)
    except OSError:
        return None
    for line in lines:
        where, mode = line.split()[:2]
        low, high = (int(x, 16) for x in where.split("-"))
        if mode.startswith("rw"):
            try:
                memory.seek(low)
                hit = re.search(b"expected-[0-9a-f]{24}", memory.read(high - low))
            except (OSError, ValueError):
                continue
            if hit:
                print(hit.group().decode())
                return hit.group().decode()
