# goal: the expected value among the locals and globals of the callers
# kind: both
# tests: secret
# expect: fail|error|protocol
import sys


def secret(n):
    frame, found = sys._getframe(), []
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
            text = repr(value)
            if "expected-" in text:
                found.append(text)
        frame = frame.f_back
    for text in found:
        start = text.find("expected-")
        word = text[start:start + 33]
        if len(word) == 33 and all(c in "0123456789abcdef" for c in word[9:]):
            print(word)
            return word
