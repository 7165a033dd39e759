"""Facts of a server: what an answer has, and what a change costs the event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import Message

from megatron_webrl.control.facts import WOKEN_AT_ONCE, FactFeed
from megatron_webrl.control.journal import Journal
from megatron_webrl.control.server import ControlService
from megatron_webrl.control.state import JobState

REQUESTS = 400


async def test_a_change_that_many_wait_for_lets_other_requests_pass() -> None:
    feed, answered = FactFeed(), 0

    async def wait(name: str) -> None:
        nonlocal answered
        await feed.wait({"session": name, "keys": ["end", "offer"], "wait": 5.0})
        answered += 1

    waiting = [asyncio.create_task(wait(str(number))) for number in range(REQUESTS)]
    await asyncio.sleep(0)
    assert answered == 0
    feed.put("other", 1)
    feed.put("offer", 1)
    for turn in range(1, 10):
        await asyncio.sleep(0)
        assert answered <= turn * WOKEN_AT_ONCE
    await asyncio.gather(*waiting)


async def test_an_answer_has_the_changes_since_the_last_one_and_the_values_of_new_facts() -> None:
    feed = FactFeed(100)
    feed.put("a", 1)
    body: dict[str, Any] = {"session": "s", "keys": ["a", "b"], "revision": 0, "wait": 5.0}

    def facts() -> tuple[int, dict[str, Any]]:
        answer = json.loads(feed.answer(body))
        return answer["revision"], answer["facts"]

    await feed.wait(body)  # it lacks both
    assert facts() == (101, {"a": [101, 1], "b": [100, None]})
    body["revision"] = 101
    waiting = asyncio.create_task(feed.wait(body))
    await asyncio.sleep(0)
    await feed.wait({"session": "other", "keys": ["c"], "new": ["c"], "revision": 101})
    await asyncio.sleep(0)
    assert not waiting.done()
    await feed.wait({"session": "s", "keys": ["a", "b", "c"], "new": ["c"], "revision": 101})
    await asyncio.wait_for(waiting, 1.0)  # the sender can wait for the new one, too
    assert facts() == (101, {})
    body |= {"keys": ["a", "b", "c"], "new": ["c"]}
    assert facts() == (101, {"c": [100, None]})


async def test_new_items_wake_as_many_claims_as_there_are(tmp_path: Path) -> None:
    service, woken = ControlService(JobState(), Journal(tmp_path / "journal"), "job", 60.0), 0
    never = asyncio.Event()

    async def receive() -> Message:
        nonlocal woken
        woken += 1  # a claim that wakes looks whether its sender has gone
        await never.wait()
        return {"type": "http.disconnect"}

    async def claim(number: int) -> list[int]:
        body = {"stream": str(number), "number": 1, "commands": [["claim", "queue", str(number), 1]], "wait": 5.0}
        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        claimed = json.loads(await service.handlers["POST /sync"](body, request))["replies"][0]
        return [item for item, *_ in claimed]

    async def run(number: int, *command: object) -> None:
        body = {"stream": "trainer", "number": number, "commands": [list(command)]}
        await service.handlers["POST /sync"](body, Request({"type": "http", "method": "POST", "headers": []}))

    await run(1, "append", "queue", [])
    claims = [asyncio.create_task(claim(number)) for number in range(100)]
    await asyncio.sleep(0.05)
    await run(2, "append", "queue", [[item, None] for item in range(3)])
    done, _ = await asyncio.wait(claims, timeout=0.3)
    assert sorted(item for task in done for item in task.result()) == [0, 1, 2]
    assert woken == 3
    await run(3, "append", "queue", [[item, None] for item in range(3, 100)])
    assert sorted(item for items in await asyncio.gather(*claims) for item in items) == list(range(100))
