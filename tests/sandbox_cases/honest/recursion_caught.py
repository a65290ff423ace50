# test: [0] -> -1
# expect: pass
def f(n):
    try:
        return f(n + 1)
    except RecursionError:
        return -1
