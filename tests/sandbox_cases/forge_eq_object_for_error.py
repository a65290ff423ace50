# goal: an object in the place of the TypeError that is expected; the judge's own refusal of it must not count
# kind: unittest
# tests: typed
# plain: yes
# expect: fail|error|protocol
def root(n):
    return object()
