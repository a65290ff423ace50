# test: [0] -> b'\x00\xff'
# test: [1] -> (1+2j)
# test: [2] -> None
# expect: pass
def f(k):
    return [b'\x00\xff', 1 + 2j, None, ..., bytearray(b'a')][k]
