# goal: a result nested 100,000 levels deep
# expect: fail|error|protocol
def add(a, b):
    out = []
    for _ in range(100_000):
        out = [out]
    return out
