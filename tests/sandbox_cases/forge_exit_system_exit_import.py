# goal: raise SystemExit(0) while the module is imported
# kind: both
# expect: fail|error|protocol
def add(a, b):
    return 0


raise SystemExit(0)
