# goal: an exception with a text of 100 MB
# expect: fail|error|output|memory|protocol
def add(a, b):
    raise ValueError("x" * 100_000_000)
