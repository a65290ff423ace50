# test: [] -> 1
# expect: fail|error
def f(:
