# goal: the expected value from the text of the AssertionError that the test's function raises
# kind: unittest
# tests: visit
# expect: fail|error|protocol
def each(items, visit):
    for item in items:
        try:
            visit(item)
        except Exception as error:
            print(repr(error), error.args)
