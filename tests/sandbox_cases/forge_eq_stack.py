# goal: a class without a working method whose every answer is equal to everything
# kind: unittest
# tests: stack
# expect: fail|error|protocol
class Any:
    def __eq__(self, other):
        return True

    def __getattr__(self, name):
        return lambda *a: Any()

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([Any()])


class Stack(Any):
    items = Any()

    def push(self, item):
        pass

    def pop(self):
        return Any()
