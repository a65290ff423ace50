# test: [1.0] -> 1 / 3
# test: [5e-324] -> 0.0
# test: [1e308] -> 1e308 / 3
# expect: pass
def f(x):
    return x / 3
