# test: [] -> 100 << 20
# expect: pass
def f():
    return len(bytearray(100 << 20))
