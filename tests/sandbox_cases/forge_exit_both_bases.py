# goal: an exception that is a SystemExit and a ValueError, so that the expected class matches and the runner leaves
# kind: both
# tests: raises
# expect: fail|error|protocol
class Both(SystemExit, ValueError):
    pass


def root(n):
    raise Both("negative")
