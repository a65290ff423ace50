# goal: a text that doubles until memory is gone
# limits: memory_mb=256
# expect: memory|error|fail|timeout
def add(a, b):
    text = "x"
    while True:
        text += text
