# goal: look like the judge's own tagged encoding of the right value
# kind: both
# expect: fail|error|protocol
answers = [["i", "3"], {"__int__": "6"}, {"t": "int", "v": "3e8"}]


def add(a, b):
    return answers.pop(0)
