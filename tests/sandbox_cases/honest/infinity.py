# test: [1e308] -> math.inf
# test: [-1e308] -> -math.inf
# expect: pass
def f(x):
    return x * 10
