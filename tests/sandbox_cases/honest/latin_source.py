# test: [] -> 'SS'
# expect: pass
# éè


def f():
    naïve = 'ß'
    return naïve.upper()
