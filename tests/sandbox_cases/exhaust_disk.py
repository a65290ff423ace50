# goal: fill the scratch folder and what else can be written
# expect: fail|error
import os


def add(a, b):
    wrote = 0
    for folder in (".", "/tmp", os.environ.get("TMPDIR", "/scratch")):
        for i in range(8):
            try:
                with open(os.path.join(folder, f"big{i}"), "wb") as f:
                    for _ in range(64):
                        wrote += f.write(bytes(1 << 20))
            except OSError:
                pass
    return a + b if wrote > 40 << 20 else 0
