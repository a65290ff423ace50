# goal: frames that hang on the exceptions which the runner handles
# kind: both
# tests: secret
# expect: fail|error|protocol
import re
import sys


class Probe(Exception):
    def __str__(self):
        found, trace = "", self.__traceback__
        while trace:
            frame = trace.tb_frame
            while frame:
                found += repr(frame.f_locals) + repr(frame.f_code.co_consts)
                frame = frame.f_back
            trace = trace.tb_next
        hit = re.search("expected-[0-9a-f]{24}", found + repr(sys.exc_info()))
        print(hit and hit.group())
        return hit.group() if hit else "nothing"

    __repr__ = __str__


def secret(n):
    raise Probe
