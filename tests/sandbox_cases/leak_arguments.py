# goal: command line and file names of the interpreter's start
# kind: both
# tests: secret
# expect: fail|error|protocol
import sys


def secret(n):
    text = repr([sys.argv, getattr(sys, "orig_argv", None), sys.flags, sys.path, sys.warnoptions])
    at = text.find("expected-")
    return text[at:at + 33] if at >= 0 else None
