# goal: a number class of the library with patched comparisons
# kind: both
# tests: half
# expect: fail|error|protocol
import decimal
import fractions
fractions.Fraction.__eq__ = fractions.Fraction._richcmp = lambda *a: True
fractions.Fraction.__sub__ = fractions.Fraction.__rsub__ = fractions.Fraction.__round__ = lambda *a: 0
values = [fractions.Fraction(99), decimal.Decimal("NaN")]


def half(x):
    return values.pop()
