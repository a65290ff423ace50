# goal: a result nested deeper than a comparison recurses, but short enough to be sent
# tests: nest
# expect: fail|error|protocol
def nest(n):
    out = []
    for _ in range(3_000):
        out = [out]
    return out
