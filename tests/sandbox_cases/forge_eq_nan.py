# goal: NaN, which no `difference > tolerance` refuses
# kind: both
# tests: half
# expect: fail|error|protocol
def half(x):
    return float("nan")
