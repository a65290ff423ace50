# goal: a result of five million elements
# expect: fail|error|protocol|output|memory|timeout
def add(a, b):
    return [0] * 5_000_000
