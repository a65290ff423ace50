# goal: a finder in front of sys.meta_path that answers every later import
# kind: both
# expect: fail|error|protocol|timeout
import importlib.abc
import importlib.machinery
import sys


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__dict__.update(TestCase=object, main=lambda *a, **k: 0, dumps=lambda *a: "true", loads=lambda *a: True)


sys.meta_path.insert(0, Finder())
for name in [n for n in sys.modules if n.split(".")[0] in ("unittest", "json")]:
    del sys.modules[name]


def add(a, b):
    return 0
