# goal: attributes with the names that a stand-in object uses for itself
# kind: unittest
# tests: stack
# expect: fail|error|protocol
class Meta(type):
    def __getattr__(cls, name):
        return True


class Stack(metaclass=Meta):
    def __getattribute__(self, name):
        return {"__class__": int, "__dict__": {"_id": 0}, "_id": 0, "_number": 0, "_call": True}.get(name, lambda *a: 2)

    def __len__(self):
        return True

    def __iter__(self):
        return iter([True])
