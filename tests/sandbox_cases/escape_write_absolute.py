# goal: make a file in a folder of the host that all may write
# expect: fail|error
def add(a, b):
    open("@DIR@/made", "w").write("x")
    return a + b
