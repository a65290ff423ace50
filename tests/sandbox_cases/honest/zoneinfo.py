# test: [] -> '2024-07-01T00:00:00+00:00'
# expect: pass
def f():
    import zoneinfo, datetime
    return datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo('UTC')).isoformat()
