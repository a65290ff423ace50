# goal: every list of verdicts in the process becomes a list of True
# kind: both
# expect: fail|error|protocol|timeout
import gc


def add(a, b):
    for thing in gc.get_objects():
        if type(thing) is list and thing and all(type(x) is bool for x in thing):
            thing[:] = [True] * len(thing)
        elif type(thing) is dict:
            for key in ("passed", "ok", "success", "status"):
                if key in thing:
                    thing[key] = "pass" if key == "status" else True
    return 0
