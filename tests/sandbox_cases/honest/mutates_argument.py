# test: [[0]] -> [0, 1]
# expect: pass
def f(xs):
    xs.append(1)
    return xs
