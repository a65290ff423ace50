# goal: StopIteration from the function, which ends a map() of the test before anything was compared
# kind: unittest
# tests: mapped
# expect: fail|error|protocol
def half(x):
    raise StopIteration
