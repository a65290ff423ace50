# goal: leave through the exit() and quit() that interactive Python has
# kind: both
# expect: fail|error|protocol
import _sitebuiltins


def add(a, b):
    try:
        exit()
    except NameError:
        _sitebuiltins.Quitter("exit", "")(0)
