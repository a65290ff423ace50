# goal: third-party packages of the host
# kind: both
# tests: secret
# expect: fail|error|protocol
import importlib
import sys


def secret(n):
    for name in ("pytest", "numpy", "torch", "pip", "_pytest.assertion"):
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        print("host package", found.__file__)
    for name, module in sys.modules.items():
        if "site-packages" in (getattr(module, "__file__", "") or ""):
            print("host package", name)
