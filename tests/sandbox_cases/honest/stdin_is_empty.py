# test: [] -> ''
# expect: pass
import sys


def f():
    return sys.stdin.read()
