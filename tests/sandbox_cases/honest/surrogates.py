# test: [55296] -> '\ud800'
# expect: pass
def f(n):
    return chr(n)
