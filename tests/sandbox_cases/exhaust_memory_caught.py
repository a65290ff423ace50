# goal: fill memory, catch the error, and go on filling
# limits: memory_mb=256 wall_s=1 cpu_s=1
# expect: memory|error|fail|timeout
kept = []


def add(a, b):
    size = 1 << 26
    while True:
        try:
            kept.append(bytearray(b"x" * size))
        except MemoryError:
            size = max(size // 2, 16)
