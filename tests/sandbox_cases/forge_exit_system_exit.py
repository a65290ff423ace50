# goal: raise SystemExit(0), which `except Exception` does not catch
# kind: both
# expect: fail|error|protocol
def add(a, b):
    raise SystemExit(0)
