# goal: catch whatever a timer throws, and go on
# limits: wall_s=1 cpu_s=1
# expect: timeout|error
def add(a, b):
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
