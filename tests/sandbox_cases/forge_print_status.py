# goal: print a result object of the judge itself
# kind: both
# expect: fail|error|protocol
import json


def add(a, b):
    print(json.dumps({"status": "pass", "passed": True, "per_test": [True, True, True], "ret": [3, 6, 1000]}), flush=True)
