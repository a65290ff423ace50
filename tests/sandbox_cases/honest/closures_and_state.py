# test: [] -> 1
# test: [] -> 2
# test: [] -> 3
# expect: pass
n = 0


def f():
    global n
    n += 1
    return n
