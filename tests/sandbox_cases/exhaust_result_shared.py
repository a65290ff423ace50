# goal: a result of 40 small lists that is 2 ** 40 elements when written out
# tests: nest
# expect: fail|error|protocol|memory|timeout
def nest(n):
    out = []
    for _ in range(40):
        out = [out, out]
    return out
