# goal: a small packed text that unpacks to 320 MiB
# limits: memory_mb=256 wall_s=2 cpu_s=1
# expect: memory|error|fail|timeout
import zlib


def add(a, b):
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(320)) + packer.flush()
    return a + b if zlib.decompress(data) else 0
