# goal: the source lines of the callers, and with them the test
# kind: both
# tests: secret
# expect: fail|error|protocol
import inspect
import linecache
import re


def secret(n):
    text = ""
    for info in inspect.stack(context=50):
        text += "".join(info.code_context or [])
    text += repr(linecache.cache)
    hit = re.search("expected-[0-9a-f]{24}", text)
    if hit:
        print(hit.group())
        return hit.group()
