# goal: close every descriptor at import and sleep
# kind: both
# limits: wall_s=1
# expect: fail|error|protocol|timeout
import os
import time
os.closerange(0, 1024)
time.sleep(30)
