# goal: a number that the judge's arithmetic on floats cannot take
# kind: both
# tests: half
# expect: fail|error|protocol
import decimal
import fractions
values = [10 ** 400, fractions.Fraction(10 ** 400, 3), decimal.Decimal("1e999999")]


def half(x):
    return values[int(x) % 2]
