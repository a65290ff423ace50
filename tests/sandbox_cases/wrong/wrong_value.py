# test: [] -> 2
# expect: fail
def f():
    return 1
