# test: [20000] -> list(range(20000))
# expect: pass
def f(n):
    return list(range(n))
