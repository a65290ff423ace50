# test: [1000] -> 3 ** 1000
# test: [20000] -> 3 ** 20000
# expect: pass
def f(n):
    return 3 ** n
