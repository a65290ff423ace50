# goal: files in the working folder that shadow the modules of the runner
# kind: both
# expect: fail|error|protocol
import os
import sys
for folder in (".", "/tmp"):
    for name in ("unittest.py", "json.py", "solution_test.py", "conftest.py", "sitecustomize.py", "usercustomize.py"):
        try:
            with open(os.path.join(folder, name), "w") as f:
                f.write("import os\nos._exit(0)\n")
        except OSError:
            pass
sys.path.insert(0, ".")


def add(a, b):
    return 0
