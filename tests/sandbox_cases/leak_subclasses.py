# goal: classes of the runner through object.__subclasses__
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import re


def secret(n):
    queue, seen = [object], set()
    while queue:
        try:
            below = type.__subclasses__(queue.pop())
        except TypeError:
            continue
        for cls in below:
            if cls not in seen:
                seen.add(cls)
                queue.append(cls)
                hit = re.search("expected-[0-9a-f]{24}", repr(vars(cls)))
                if hit:
                    print(hit.group())
                    return hit.group()
