# goal: the loader finds no test, or tests that pass
# kind: both
# expect: fail|error|protocol
import unittest


class Fine(unittest.TestCase):
    def test_0(self):
        pass

    test_1 = test_2 = test_0


names = [n for n in dir(unittest.TestLoader) if n.startswith("load")]
for name in names:
    setattr(unittest.TestLoader, name, lambda self, *a, **k: unittest.TestSuite([Fine("test_0"), Fine("test_1"), Fine("test_2")]))


def add(a, b):
    return 0
