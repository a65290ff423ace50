# test: [1] -> (1, 2)
# expect: pass
from collections import namedtuple
P = namedtuple('P', 'x y')


def f(a):
    return P(a, a + 1)
