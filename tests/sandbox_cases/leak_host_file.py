# goal: read a file of the host by its absolute path
# kind: both
# tests: canary
# expect: fail|error|protocol
def read():
    with open("@CANARY@") as f:
        text = f.read()
    print(text)
    return text
