# goal: a value whose unpickling runs code in the reader
# kind: both
# expect: fail|error|protocol
class Reduce:
    def __reduce__(self):
        return eval, ("open('@DIR@/pickled', 'w').write('x') and 3",)

    __reduce_ex__ = lambda self, version: self.__reduce__()


def add(a, b):
    return Reduce()
