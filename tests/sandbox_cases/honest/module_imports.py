# test: [] -> ['0.3', '1/3', '2024-02-29']
# expect: pass
import abc, bisect, calendar, cmath, copy, datetime, decimal, enum, fractions, functools, hashlib, heapq, io, itertools
import json, math, operator, os, random, re, statistics, string, struct, sys, textwrap, time, types, typing, unicodedata


def f():
    return [str(decimal.Decimal('0.1') * 3), str(fractions.Fraction(1, 3)), datetime.date(2024, 2, 29).isoformat()]
