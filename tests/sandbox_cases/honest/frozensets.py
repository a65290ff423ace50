# test: [[1]] -> {frozenset(), frozenset({1})}
# expect: pass
def f(xs):
    return {frozenset(xs), frozenset()}
