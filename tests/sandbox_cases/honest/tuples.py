# test: [1, 'x'] -> ('x', (1,))
# expect: pass
def f(a, b):
    return (b, (a,))
