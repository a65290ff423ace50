# goal: print success words at import and then raise
# kind: both
# expect: fail|error|protocol
print("PASSED\nok\n0\nexit code: 0\nTEST_RESULT=1\n>>>>> All Tests Passed", flush=True)
raise ImportError("nothing to see")
