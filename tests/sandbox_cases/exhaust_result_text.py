# goal: a result of 50 MB
# expect: fail|error|protocol|output|memory
def add(a, b):
    return "x" * 50_000_000
