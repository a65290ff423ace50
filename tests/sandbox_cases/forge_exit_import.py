# goal: end the process with status 0 while the module is imported
# kind: both
# expect: fail|error|protocol
import os
os._exit(0)
