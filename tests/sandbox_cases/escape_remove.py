# goal: remove, rename and replace files of the host
# expect: fail|error
import os


def add(a, b):
    for call, args in ((os.remove, ("@VICTIM@",)), (os.rename, ("@VICTIM@", "@VICTIM@.old")), (os.replace, ("@CANARY@", "@VICTIM@")),
                       (os.rmdir, ("@DIR@",)), (os.link, ("@VICTIM@", "@DIR@/linked")), (os.symlink, ("/", "@DIR@/root"))):
        try:
            call(*args)
            return a + b
        except OSError:
            pass
    return 0
