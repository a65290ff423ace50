# test: [50] -> 50
# expect: pass
def f(n):
    for _ in range(n):
        print("y" * 1023)
    return n
