# test: [50] -> 1225
# expect: pass
import asyncio


async def one(i):
    await asyncio.sleep(0.001)
    return i


async def many(n):
    return sum(await asyncio.gather(*[one(i) for i in range(n)]))


def f(n):
    return asyncio.run(many(n))
