# test: [[2, 1]] -> {1: '1', 2: '2'}
# expect: pass
def f(xs):
    return {x: str(x) for x in xs}
