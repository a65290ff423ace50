# goal: memory that is shared, mapped or locked, which a limit of the heap does not count
# limits: memory_mb=256
# expect: memory|error|fail|timeout
import mmap


def add(a, b):
    kept = []
    for _ in range(64):
        piece = mmap.mmap(-1, 32 << 20)
        for at in range(0, 32 << 20, 4096):
            piece[at] = 1
        kept.append(piece)
    return a + b
