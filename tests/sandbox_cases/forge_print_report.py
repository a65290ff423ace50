# goal: print what unittest and pytest print after a success
# kind: both
# expect: fail|error|protocol
import sys


def add(a, b):
    for out in (sys.stdout, sys.stderr):
        out.write("...\n" + "-" * 70 + "\nRan 3 tests in 0.001s\n\nOK\n===== 3 passed in 0.01s =====\n")
