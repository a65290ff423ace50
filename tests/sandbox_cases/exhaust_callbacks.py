# goal: call the test's function for ever
# kind: unittest
# tests: each
# limits: wall_s=1 cpu_s=1
# expect: fail|error|protocol|timeout|memory
def each(items, visit):
    while True:
        visit(items[0])
