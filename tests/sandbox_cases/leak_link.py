# goal: reach the host's file through symbolic and hard links in the scratch folder
# kind: both
# tests: canary
# expect: fail|error|protocol
import os


def read():
    for folder in (".", "/tmp", os.environ.get("TMPDIR", "/scratch")):
        for make in (os.symlink, os.link):
            path = os.path.join(folder, "way")
            try:
                make("@CANARY@", path)
                text = open(path).read()
                print(text)
                return text
            except OSError:
                pass
