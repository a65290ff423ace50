# test: [1] -> Raises("ValueError", "negative")
# expect: pass
class Odd(ValueError):
    pass


def f(x):
    raise Odd('negative')
