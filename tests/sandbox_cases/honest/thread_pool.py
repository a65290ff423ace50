# test: [100] -> 5050
# expect: pass
from concurrent.futures import ThreadPoolExecutor


def f(n):
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(lambda x: x + 1, range(n)))
