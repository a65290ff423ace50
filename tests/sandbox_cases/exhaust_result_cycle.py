# goal: a result that holds itself
# tests: nest
# expect: fail|error|protocol
def nest(n):
    out = []
    out.append(out)
    return out
