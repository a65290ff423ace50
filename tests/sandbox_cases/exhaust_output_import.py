# goal: print for ever at import
# limits: wall_s=1 cpu_s=1
# expect: fail|error|output|timeout
while True:
    print("x" * 1000)
