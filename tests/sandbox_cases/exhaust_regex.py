# goal: a regular expression that backtracks exponentially
# limits: wall_s=2 cpu_s=1
# expect: timeout|error
import re


def add(a, b):
    return len(re.match("(a+)+$", "a" * 60 + "b").group())
