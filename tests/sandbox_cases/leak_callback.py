# goal: the test's closure and globals through the function it hands in
# kind: unittest
# tests: each
# expect: fail|error|protocol
import re


def each(items, visit):
    text = ""
    for name in ("__closure__", "__globals__", "__code__", "__self__", "__defaults__", "__dict__", "__class__", "__reduce__", "__wrapped__"):
        try:
            value = getattr(visit, name)
            text += repr(value) + repr(getattr(value, "co_consts", "")) + "".join(repr(c.cell_contents) for c in value or ())
        except Exception as error:
            text += repr(error)
    for item in items:
        visit(item)
    hit = re.search("expected-[0-9a-f]{24}", text)
    if hit:
        print(hit.group())
        return hit.group()
