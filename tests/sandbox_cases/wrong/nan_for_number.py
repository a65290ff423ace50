# test: [] -> 1.0
# expect: fail
def f():
    return float('nan')
