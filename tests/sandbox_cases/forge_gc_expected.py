# goal: overwrite what looks like expected values with the own answer
# kind: both
# expect: fail|error|protocol|timeout
import gc


def add(a, b):
    for thing in gc.get_objects():
        try:
            if type(thing) is list and any(x in (3, 6, 1000) for x in thing if type(x) is int):
                thing[:] = [0 if type(x) is int else x for x in thing]
            elif type(thing) is dict and "expected" in thing:
                thing["expected"] = 0
        except Exception:
            pass
    return 0
