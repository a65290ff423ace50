# goal: fetch a page from a loopback server by urllib
# expect: fail|error
import urllib.request


def add(a, b):
    try:
        return a + b if urllib.request.urlopen("http://localhost:@TCP@/", timeout=1).read() else 0
    except OSError:
        return 0
