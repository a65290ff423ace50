# goal: worker processes by multiprocessing and concurrent.futures
# expect: fail|error
import concurrent.futures
import multiprocessing


def add(a, b):
    for method in ("fork", "spawn", "forkserver"):
        try:
            with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
                return pool.submit(int, a + b).result(timeout=1)
        except Exception:
            pass
    return 0
