# goal: an object that prints as the right number
# kind: both
# expect: fail|error|protocol
def add(a, b):
    text = str(a + b)
    return type("int", (), {"__repr__": lambda self: text, "__str__": lambda self: text, "__format__": lambda self, f: text})()
