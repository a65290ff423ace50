# goal: files in the shared folders of every host
# expect: fail|error
def add(a, b):
    for path in ("/tmp/@MARK@", "/var/tmp/@MARK@", "/dev/shm/@MARK@", "/dev/mqueue/@MARK@", "@MARK@"):
        try:
            open(path, "w").write("x")
        except OSError:
            pass
    return 0
