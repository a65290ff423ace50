# test: [] -> 1
# expect: fail|error
import no_such_module


def f():
    return 1
