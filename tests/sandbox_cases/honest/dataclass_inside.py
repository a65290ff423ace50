# test: [3] -> 3
# expect: pass
from dataclasses import dataclass


@dataclass
class P:
    x: int


def f(n):
    return P(n) == P(n) and P(n).x
