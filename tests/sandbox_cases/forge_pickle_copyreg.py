# goal: register a reducer for int so that results decode to something else
# kind: both
# expect: fail|error|protocol
import copyreg
import marshal
copyreg.pickle(int, lambda n: (int, (3,)))
marshal.dumps = lambda value, *a: b"i\x03\x00\x00\x00"


def add(a, b):
    return 0
