# goal: use the processor for ever while the module is imported
# limits: wall_s=2 cpu_s=1
# expect: timeout|error
while True:
    pass
