# goal: answer all calls in the first one with a right value each, by re-using the runner's own encoder
# kind: both
# expect: fail|error|protocol|timeout
import sys


def add(a, b):
    frame, seen = sys._getframe(1), []
    while frame:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if callable(value) and any(word in name for word in ("send", "write", "encode", "reply", "pack")):
                for argument in (3, [3], [3, 6, 1000], b"[3, 6, 1000]", {"status": "pass"}):
                    try:
                        seen.append(value(argument))
                    except Exception:
                        pass
        frame = frame.f_back
    return 0
