"""What a server says of facts and of the liveness of roles; what clients take of several servers' answers."""

from __future__ import annotations

import asyncio
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from megatron_webrl.control import facts
from megatron_webrl.control.connection import Connection
from megatron_webrl.control.facts import FactFeed, FactFollower
from megatron_webrl.control.journal import Journal
from megatron_webrl.control.liveness import MAX_EPISODES, VIEW_SECONDS, Liveness
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


async def test_a_request_waits_although_its_sender_follows_nothing_yet() -> None:
    feed = FactFeed()
    waiting = asyncio.create_task(feed.wait({"session": "s", "wait": 5.0}))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await feed.wait({"session": "s", "keys": ["a"], "new": ["a"]})
    await asyncio.wait_for(waiting, 1.0)


async def test_the_end_of_a_server_keeps_no_request_waiting() -> None:
    feed, body = FactFeed(), {"session": "s", "keys": ["a"], "revision": 0, "wait": 5.0}
    waiting = asyncio.create_task(feed.wait(body))
    await asyncio.sleep(0)
    feed.release()
    await asyncio.wait_for(waiting, 1.0)
    await asyncio.wait_for(feed.wait(body), 1.0)


async def post(service: ControlService, stream: str, number: int, *command: object, ended: bool = False) -> Any:
    """The reply to a command that may wait; `ended`: the process that sent it has ended meanwhile."""

    async def receive() -> dict[str, str]:
        if not ended:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    body = {"stream": stream, "number": number, "commands": [list(command)], "wait": 5.0}
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    return json.loads(await service.handlers["POST /sync"](body, request))["replies"][0]


async def test_claims_that_wait_get_each_new_item_once(tmp_path: Path) -> None:
    run = partial(post, ControlService(JobState(), Journal(tmp_path / "journal"), "job", 60.0))
    await run("trainer", 1, "append", "queue", [])
    claims = [asyncio.create_task(run(str(number), 1, "claim", "queue", str(number), 1)) for number in range(100)]
    again = asyncio.create_task(run("0", 1, "claim", "queue", "0", 1))  # the same request, sent again
    await asyncio.sleep(0.05)
    await run("trainer", 2, "append", "queue", [[item, None] for item in range(100)])
    claimed = await asyncio.gather(*claims)
    assert sorted(item for items in claimed for item, *_ in items) == list(range(100))
    assert await again == claimed[0]


async def test_many_requests_that_wait_make_heartbeats_less_frequent_and_leave_nothing_once_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "REQUESTS_PER_SECOND", 2)
    feed = FactFeed()

    def interval() -> float:
        answered: float = json.loads(feed.answer({}))["interval"]
        return answered

    def count_events() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Event) for each in gc.get_objects())

    before = count_events()
    async with asyncio.TaskGroup() as waiting:
        for number in range(6):
            waiting.create_task(feed.wait({"session": str(number), "keys": ["a", "b"], "wait": 0.02}))
        await asyncio.sleep(0)
        assert interval() == 3.0
    assert (interval(), count_events()) == (facts.HEARTBEAT_SECONDS, before)


def test_older_news_change_nothing_whichever_server_they_come_from(tmp_path: Path) -> None:
    changes: list[object] = []
    follower = FactFollower(
        Connection(tmp_path / "none", "rollout-0"),
        on_answer=lambda new, revision: changes.extend(value for _, value, _ in new),
    )

    def answer(revision: int, changed: int, value: int, **fields: object) -> dict[str, object]:
        return {"revision": revision, "interval": 1.0, "facts": {"offer": [changed, value], **fields}}

    request = follower.request(["offer"])
    assert (request["keys"], request["new"], request["revision"]) == (["offer"], ["offer"], 0)
    assert follower.request()["keys"] == ["offer"]  # another thread's request waits for its changes, too
    follower.merge(request, answer(7, 7, 2))
    follower.merge(follower.request(), answer(5, 5, 1))  # of a relay
    assert (follower.facts, changes, follower.request()["revision"]) == ({"offer": (7, 2)}, [2], 7)
    early = follower.request()
    follower.merge(follower.request(["stop"]), answer(9, 9, 3, stop=[8, None]))
    follower.merge(early, answer(12, 9, 3))  # says nothing of changes of the other fact
    assert (follower.facts["offer"], follower.request()["revision"], changes) == ((9, 3), 9, [2, 3, None])


async def test_an_item_that_comes_goes_to_no_process_that_has_ended_while_it_waited(tmp_path: Path) -> None:
    run = partial(post, ControlService(JobState(), Journal(tmp_path / "journal"), "job", 60.0))
    ended = asyncio.create_task(run("ended", 1, "claim", "queue", "rollout-0", 1, ended=True))
    waiting = [asyncio.create_task(run(stream, 1, "claim", "queue", stream, 1)) for stream in ("a", "b")]
    again = asyncio.create_task(run("a", 1, "claim", "queue", "a", 1))  # the same request, sent again
    await asyncio.sleep(0)
    await run("trainer", 1, "append", "queue", [[item, None] for item in range(2)])
    claimed = await asyncio.gather(ended, *waiting, again)
    assert claimed == [[], [[0, None, 0]], [[1, None, 0]], [[0, None, 0]]]


def test_a_late_report_of_an_ended_process_does_not_undo_the_clearing_of_its_role() -> None:
    liveness = Liveness(10.0)
    liveness.report("rollout-0", 1.0, {"sender": "first", "progress": "1:1"})
    liveness.clear("rollout-0")
    liveness.report("rollout-0", 1.5, {"sender": "first", "progress": "1:2"})
    assert liveness.to_json(2.0)["rollout-0"]["cleared"]
    assert liveness.silent_roles(12.0) == {"rollout-0": True}
    liveness.report("rollout-0", 12.0, {"sender": "second"})
    assert liveness.silent_roles(13.0) == {}
    assert liveness.silent_roles(60.0) == {}  # a pause of the service
    found = [liveness.silent_roles(float(now)) for now in range(61, 71)]
    assert found == [{}] * 9 + [{"rollout-0": False}]


def test_an_older_report_that_comes_late_makes_no_role_silent() -> None:
    liveness = Liveness(10.0)
    for heard_at in (9.0, 1.0):  # the second one through the relay
        liveness.report("rollout-0", heard_at, {"sender": "rollout-0"})
    assert liveness.silent_roles(12.0) == {}


def test_a_job_is_looked_at_until_its_last_viewer_stops_asking_and_only_living_workers_are_shown() -> None:
    liveness = Liveness(20.0)
    assert liveness.viewed(0.0) is None
    liveness.look(0.0, [f"rollout-0/{number}" for number in range(MAX_EPISODES)])
    liveness.look(1.0, ["rollout-0/0", "rollout-1/new"])
    kept = {f"rollout-0/{number}" for number in range(MAX_EPISODES) if number != 1}
    assert liveness.viewed(1.0) == {"episodes": sorted({*kept, "rollout-1/new"})}  # those asked for last count
    liveness.look(6.0, [])
    assert liveness.viewed(VIEW_SECONDS + 1) == {"episodes": ["rollout-0/0", "rollout-1/new"]}
    assert liveness.viewed(VIEW_SECONDS + 2) == {"episodes": []}
    assert liveness.viewed(VIEW_SECONDS + 7) is None
    for role in ("rollout-0", "rollout-1", "rollout-2", "trainer-0"):
        liveness.report(role, 0.0, {"sender": role} | ({"rollouts": f"[{role}]"} if role != "trainer-0" else {}))
    assert liveness.rollouts(1.5)["rollout-0"] == (1.5, "[rollout-0]")
    liveness.clear("rollout-1")  # its supervisor restarts it
    liveness.report("rollout-2", 2.0, {"sender": "rollout-2"})  # nobody looks
    assert sorted(liveness.rollouts(2.0)) == ["rollout-0"]
    assert not liveness.rollouts(21.0)
