# test: [1] -> 1
# expect: fail|error
def f():
    return 1
