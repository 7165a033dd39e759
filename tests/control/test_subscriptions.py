"""Wakes of waiting requests: what one change costs the event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from starlette.requests import Request
from starlette.types import Message

from megatron_webrl.control.journal import Journal
from megatron_webrl.control.service import ControlService
from megatron_webrl.control.state import JobState
from megatron_webrl.control.subscriptions import WOKEN_AT_ONCE, Subscriptions

SESSIONS = 400


async def test_a_change_that_many_wait_for_lets_other_requests_pass() -> None:
    subscriptions, answered = Subscriptions(lambda key: (1, None)), 0

    async def wait(name: str) -> None:
        nonlocal answered
        body = {"session": name, "subscribe": ["offer"], "wait": 5.0}
        first = json.loads(subscriptions.answer(body))
        await subscriptions.wait(body | {"server": first["server"], "known": subscriptions.number + SESSIONS})
        answered += 1

    waiting = [asyncio.create_task(wait(str(number))) for number in range(SESSIONS)]
    await asyncio.sleep(0)
    assert answered == 0
    subscriptions.publish("offer")
    for turn in range(1, 10):
        await asyncio.sleep(0)
        assert answered <= turn * WOKEN_AT_ONCE
    await asyncio.gather(*waiting)


async def test_new_items_wake_as_many_claims_as_there_are(tmp_path: Path) -> None:
    service, woken = ControlService(JobState(), Journal(tmp_path / "journal"), "job", 60.0), 0
    never = asyncio.Event()

    async def receive() -> Message:
        nonlocal woken
        woken += 1  # a claim that wakes looks whether its sender has gone
        await never.wait()
        return {"type": "http.disconnect"}

    async def claim(number: int) -> list[int]:
        body = {"stream": str(number), "number": 1, "arguments": ["queue", str(number), 1], "wait": 5.0}
        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        claimed = json.loads(await service.handlers["POST /claim"](body, request))["replies"][0]
        return [item for item, *_ in claimed]

    async def run(number: int, *command: object) -> None:
        body = {"stream": "trainer", "number": number, "commands": [list(command)]}
        await service.handlers["POST /commands"](body, Request({"type": "http", "method": "POST", "headers": []}))

    await run(1, "append", "queue", [])
    claims = [asyncio.create_task(claim(number)) for number in range(100)]
    await asyncio.sleep(0.05)
    await run(2, "append", "queue", [[item, None] for item in range(3)])
    done, _ = await asyncio.wait(claims, timeout=0.3)
    assert sorted(item for task in done for item in task.result()) == [0, 1, 2]
    assert woken == 3
    await run(3, "append", "queue", [[item, None] for item in range(3, 100)])
    assert sorted(item for items in await asyncio.gather(*claims) for item in items) == list(range(100))
