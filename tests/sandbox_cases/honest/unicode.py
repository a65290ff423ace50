# test: ['a\xe4\u6f22'] -> '\u6f22\xe4a\U0001f600\u200d\x00'
# expect: pass
def f(s):
    print(s)
    return s[::-1] + '\U0001f600\u200d\u0000'
