# test: [-1] -> Raises("ValueError", "negative")
# expect: fail
def f(x):
    raise KeyError('negative')
