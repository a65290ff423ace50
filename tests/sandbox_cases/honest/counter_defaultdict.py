# test: [0, 'aab'] -> {'a': 2, 'b': 1}
# test: [1, 'aab'] -> {'a': 2, 'b': 1}
# test: [2, 'aab'] -> {'a': 2, 'b': 1}
# expect: pass
from collections import Counter, OrderedDict, defaultdict


def f(k, s):
    counts = defaultdict(int)
    for c in s:
        counts[c] += 1
    return [Counter(s), counts, OrderedDict(sorted(counts.items()))][k]
