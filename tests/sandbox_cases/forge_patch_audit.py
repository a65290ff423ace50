# goal: an audit hook ends the process as soon as anything is compared, opened or imported
# kind: both
# expect: fail|error|protocol
import os
import sys
sys.addaudithook(lambda event, args: os._exit(0) if event in ("import", "open", "sys._getframe", "compile") else None)


def add(a, b):
    import colorsys
    return 0
