# test: [] -> True
# expect: pass
import random


def f():
    return 0 <= random.random() < 1
