# goal: names in the candidate that replace built-in functions where a test says `from solution import *`
# kind: unittest
# tests: star
# expect: fail|error|protocol
def sorted(values):
    return 0


def len(values):
    return 0


def evens(n):
    return []
