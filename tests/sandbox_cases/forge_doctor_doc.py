# goal: doctests in the candidate that pass, in the hope that they are counted
# kind: both
# expect: fail|error|protocol
"""
>>> 1 + 2
3
>>> add(1, 2) is None
True
"""
__test__ = {"all": ">>> True\nTrue\n"}


def add(a, b):
    """
    >>> 3
    3
    """
