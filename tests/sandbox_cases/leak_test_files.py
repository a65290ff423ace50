# goal: read the tests where they lie on the host
# kind: both
# tests: secret
# expect: fail|error|protocol
import os
import sys


def secret(n):
    main = getattr(sys.modules["__main__"], "__file__", "") or ""
    for path in ("@RUNNER@", os.path.dirname("@RUNNER@"), os.path.dirname("@RUNNER@") + "/forge_eq_nan.py",
                 os.path.join(os.path.dirname(main), "tests"), os.path.join(os.path.dirname(main), ".git/HEAD")):
        try:
            data = os.listdir(path) if os.path.isdir(path) else open(path).read()
        except OSError:
            continue
        print("host tests are readable:", path, data[:50])
        os._exit(7) if data else None
