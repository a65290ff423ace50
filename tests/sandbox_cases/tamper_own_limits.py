# goal: raise the own limits again
# expect: fail|error
import resource


def add(a, b):
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
        soft, hard = resource.getrlimit(kind)
        if hard == resource.RLIM_INFINITY:
            return a + b                           # there is no limit
        try:
            resource.setrlimit(kind, (hard + 1, hard + 1))
            return a + b
        except (OSError, ValueError):
            pass
    return 0
