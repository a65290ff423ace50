# goal: append to and rewrite a file of the host
# expect: fail|error
def add(a, b):
    for mode in ("a", "r+", "w"):
        try:
            open("@VICTIM@", mode).write("x")
        except OSError:
            continue
        return a + b
    return 0
