# test: [[1, 2, 2]] -> {1, 2}
# test: [[]] -> set()
# expect: pass
def f(xs):
    return set(xs)
