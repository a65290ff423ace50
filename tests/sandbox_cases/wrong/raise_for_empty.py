# test: [1] -> ''
# expect: fail|error
def f(x):
    raise ValueError('negative')
