# goal: Decimal and complex results that compare loosely
# kind: both
# expect: fail|error|protocol
import decimal
values = [decimal.Decimal("sNaN"), complex("nan"), decimal.Decimal("Infinity")]


def add(a, b):
    return values.pop()
