# test: [2] -> 2.0
# test: [True] -> 1
# expect: pass
def f(x):
    return x
