# goal: code that makes the compiler run out of memory or stack
# expect: fail|error|memory|timeout
def add(a, b):
    eval("(" * 90 + "1" + ")" * 90)
    return eval("-" * 3_000_000 + "1") if a else exec("x = " + "[" * 100 + "]" * 100)
