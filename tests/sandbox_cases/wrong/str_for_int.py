# test: [] -> 1
# expect: fail
def f():
    return '1'
