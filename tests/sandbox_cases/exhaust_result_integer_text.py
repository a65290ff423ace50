# goal: an integer past the limit of digits that conversion to text allows
# expect: fail|error|protocol
import sys


def add(a, b):
    sys.set_int_max_str_digits(0)
    return 10 ** 30_000
