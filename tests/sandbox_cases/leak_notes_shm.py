# goal: leave a note in POSIX shared memory and named semaphores
# kind: both
# runs: 2
# expect: fail|error|protocol
from multiprocessing import shared_memory
found = False
try:
    shared_memory.SharedMemory("@MARK@")
    found = True
except OSError:
    try:
        shared_memory.SharedMemory("@MARK@", create=True, size=64)
    except OSError:
        pass


def add(a, b):
    return a + b if found else 0
