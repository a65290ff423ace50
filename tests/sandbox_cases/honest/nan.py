# test: [math.inf] -> math.nan
# expect: pass
def f(x):
    return x - x
