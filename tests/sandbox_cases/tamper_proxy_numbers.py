# goal: name objects by numbers that the judge never gave out
# kind: unittest
# tests: stack
# expect: fail|error|protocol
class Stack:
    def push(self, item):
        pass

    def pop(self):
        return ["p", 0], {"proxy": 10 ** 9}, {"ref": -1}, ["callback", 1]

    def __len__(self):
        return -1

    @property
    def items(self):
        raise AttributeError(["r", 2 ** 70])
