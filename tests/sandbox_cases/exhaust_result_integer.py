# goal: an integer of a million digits
# expect: fail|error|protocol
def add(a, b):
    return 1 << 4_000_000
