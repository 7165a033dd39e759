"""Facts of a server: what an answer has, and what a change costs the event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from starlette.requests import Request

from megatron_webrl.control.facts import FactFeed
from megatron_webrl.control.journal import Journal
from megatron_webrl.control.server import ControlService
from megatron_webrl.control.state import JobState


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


async def test_claims_that_wait_get_each_new_item_once(tmp_path: Path) -> None:
    service = ControlService(JobState(), Journal(tmp_path / "journal"), "job", 60.0)

    async def connected() -> Any:
        await asyncio.Event().wait()

    async def run(stream: str, number: int, *command: object) -> Any:
        body = {"stream": stream, "number": number, "commands": [list(command)], "wait": 5.0}
        request = Request({"type": "http", "method": "POST", "headers": []}, connected)
        return json.loads(await service.handlers["POST /sync"](body, request))["replies"][0]

    await run("trainer", 1, "append", "queue", [])
    claims = [asyncio.create_task(run(str(number), 1, "claim", "queue", str(number), 1)) for number in range(100)]
    again = asyncio.create_task(run("0", 1, "claim", "queue", "0", 1))  # the same request, sent again
    await asyncio.sleep(0.05)
    await run("trainer", 2, "append", "queue", [[item, None] for item in range(100)])
    claimed = await asyncio.gather(*claims)
    assert sorted(item for items in claimed for item, *_ in items) == list(range(100))
    assert await again == claimed[0]
