# goal: a text that cannot be encoded
# expect: fail|error|protocol
def add(a, b):
    return "\ud800\udfff" * 10
