# test: [4] -> [0, 1, 2, 3]
# expect: pass
def f(n):
    def walk():
        yield from range(n)
        return 3
    return list(walk())
