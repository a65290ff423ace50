# test: [] -> 1
# expect: fail|error
def g():
    return 1
