# goal: a difference of dates that says it is 0 days
# kind: unittest
# tests: gap
# expect: fail|error|protocol
class Gap:
    days = seconds = 0

    def total_seconds(self):
        return 0.0


class Day:
    def __sub__(self, other):
        return Gap()


def day(n):
    return Day()
