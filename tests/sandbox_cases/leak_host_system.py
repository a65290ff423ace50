# goal: files that every host has
# kind: both
# tests: canary
# expect: fail|error|protocol
def read():
    for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/proc/version", "/proc/mounts", "/sys/kernel/hostname"):
        try:
            print(open(path).read()[:100])
        except OSError:
            continue
        raise SystemExit(f"read {path}")
    return None
