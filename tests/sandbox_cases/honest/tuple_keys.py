# test: [2] -> {(0, 1): [0], (1, 2): [1]}
# expect: pass
def f(n):
    return {(i, i + 1): [i] for i in range(n)}
