# goal: posix_spawn, vfork and pty.spawn
# expect: fail|error
import _posixsubprocess
import os
import pty


def add(a, b):
    for call in (lambda: os.posix_spawn("/bin/true", ["true"], {}), lambda: os.spawnv(os.P_WAIT, "/bin/true", ["true"]),
                 lambda: pty.fork(), lambda: os.forkpty(),
                 lambda: _posixsubprocess.fork_exec([b"/bin/true"], [b"/bin/true"], True, (), None, None, -1, -1, -1, -1, -1, -1, -1, -1,
                                                    True, False, 0, None, None, None, -1, None, True)):
        try:
            if call() not in (127, -1):
                return a + b
        except (OSError, TypeError):
            pass
    return 0
