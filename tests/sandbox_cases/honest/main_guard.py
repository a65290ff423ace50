# test: [] -> 1
# expect: pass
def f():
    return 1


if __name__ == "__main__":
    raise SystemExit("ran as a script")
