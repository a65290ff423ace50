# goal: read what lies in the inherited descriptors
# kind: both
# tests: secret
# limits: wall_s=2
# expect: fail|error|protocol|timeout
import os
import re


def secret(n):
    for fd in [0, *range(3, 256)]:
        try:
            os.set_blocking(fd, False)
            data = os.read(fd, 1 << 20)
        except OSError:
            continue
        print(data[:2000])
        hit = re.search(b"expected-[0-9a-f]{24}", data)
        if hit:
            return hit.group().decode()
