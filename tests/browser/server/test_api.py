"""The public paths of a browser server."""

from __future__ import annotations

import asyncio

import pytest

from megatron_webrl.browser.server.api import shared


async def test_concurrent_calls_share_one_run() -> None:
    runs = 0
    may_end = asyncio.Event()

    async def work() -> int:
        nonlocal runs
        runs += 1
        number = runs
        await may_end.wait()
        if number == 2:
            raise ValueError("the second run fails")
        return number

    call = shared(work)
    calls = [asyncio.ensure_future(call()) for _ in range(20)]
    await asyncio.sleep(0)  # all of them have begun
    calls.pop().cancel()  # a client that disconnects ends no run of others
    may_end.set()
    assert set(await asyncio.gather(*calls)) == {1}
    with pytest.raises(ValueError, match="second"):
        await call()
    assert await call() == 3
