# test: [2 ** 200] -> -2 ** 200
# expect: pass
def f(n):
    return -n
