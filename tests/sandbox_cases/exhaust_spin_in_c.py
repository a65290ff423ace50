# goal: one call into C that never gives the interpreter back
# limits: wall_s=2 cpu_s=1
# expect: timeout|error|memory
def add(a, b):
    return len(str(7 ** (7 ** (7 ** 2)) % 10)) if a else sum(iter(int, 1))
