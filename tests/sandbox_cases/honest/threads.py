# test: [8] -> [i * i for i in range(8)]
# test: [0] -> []
# expect: pass
import threading


def f(n):
    out, lock = [], threading.Lock()

    def work(i):
        with lock:
            out.append(i * i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(out)
