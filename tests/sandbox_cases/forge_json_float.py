# goal: values that JSON writes as numbers but are none: Infinity, NaN, 1e999
# kind: both
# tests: half
# expect: fail|error|protocol
values = [float("nan"), float("inf")]


def half(x):
    return values[int(x) % 2]
