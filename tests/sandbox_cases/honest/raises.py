# test: [1] -> 1
# test: [-1] -> Raises("ValueError", "negative")
# expect: pass
def f(x):
    if x < 0:
        raise ValueError('negative')
    return x
