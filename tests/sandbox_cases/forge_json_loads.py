# goal: json.loads turns every request into one whose answer is known
# kind: both
# expect: fail|error|protocol|timeout
import json
real = json.loads
json.loads = lambda text, **k: {"status": "pass", "id": 0, "args": [1, 2], "calls": []}
json.JSONDecoder.decode = lambda self, text, *a: {"status": "pass"}


def add(a, b):
    return 3
