# goal: the expected value among all objects that the collector knows
# kind: both
# tests: secret
# expect: fail|error|protocol|timeout
import gc
import re


def secret(n):
    gc.unfreeze()
    for thing in gc.get_objects():
        try:
            for text in thing if isinstance(thing, (list, tuple, set)) else thing.values() if isinstance(thing, dict) else ():
                hit = re.search("expected-[0-9a-f]{24}", text) if type(text) is str else None
                if hit:
                    print(hit.group())
                    return hit.group()
        except Exception:
            pass
