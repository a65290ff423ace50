# test: [[1]] -> None
# expect: pass
from __future__ import annotations
from typing import List


def f(x: List[int]) -> None:
    return None
