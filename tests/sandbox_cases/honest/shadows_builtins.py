# test: [] -> 3
# expect: pass
def list(x):
    return x
sum = 3


def f():
    return sum
