# goal: fill memory in small pieces until something gives
# limits: memory_mb=256
# expect: memory|error|fail|timeout
def add(a, b):
    kept = []
    while True:
        kept.append(bytes(100_000))
