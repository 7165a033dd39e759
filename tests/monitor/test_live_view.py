"""What a viewer of a running job's rollouts gets: everything, then changes; and one rollout with its episode so far."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor import live_view
from megatron_webrl.monitor.live_view import RolloutTracker
from megatron_webrl.track.live_rollouts import ACTING, CHANGING, FIXED, STATES, running_file
from tests.monitor.live_job import live_job
from tests.monitor.runs import TOKEN, episode, serve, write_run

LIMIT = 60.0


def row(key: str, state: int = 0, since: float = 5.0, task: str = "web/1") -> list[Any]:
    return [key, "training", 1, 0, 4, task, "shop.test", "easy", 9, state, "", 2, 7, 1, since]


def report(now: float, *rows: list[Any]) -> str:
    return json.dumps([now, rows])


def test_only_what_changes_is_told_and_times_are_those_of_the_viewers_clock():
    tracker = RolloutTracker()
    first = tracker.update({"rollout-0": (0.5, report(10.0, row("a"), row("b")))}, now=1000.0)
    assert [each[:3] for each in first["added"]] == [[0, "rollout-0", "a"], [1, "rollout-0", "b"]]
    assert first["added"][0][-1] == 1000.0 - 0.5 - 10.0 + 5.0
    assert tracker.whole()["added"] == first["added"]
    later = tracker.update({"rollout-0": (0.9, report(11.0, row("a"), row("b", 4, 10.8), row("c")))}, now=1001.0)
    assert [each[2] for each in later["added"]] == ["c"]
    assert later["changed"] == [[1, 4, "", 2, 7, 1, round(1001.0 - 0.9 - 11.0 + 10.8, 2)]]
    assert later["removed"] == []
    same = tracker.update({"rollout-0": (1.4, report(11.0, row("a"), row("b", 4, 10.8), row("c")))}, now=1001.5)
    assert same == {"added": [], "changed": [], "removed": []}
    assert tracker.counts()[:5] == [2, 0, 0, 0, 1]
    found = tracker.find("rollout-0", "b")
    assert found is not None
    assert (found["state"], found["task"]) == (STATES[4], "web/1")


def test_rollouts_end_with_their_row_with_their_worker_and_when_another_takes_their_name():
    tracker = RolloutTracker()
    both = {"rollout-0": (0.0, report(1.0, row("a"), row("b"))), "rollout-1": (0.0, report(1.0, row("a")))}
    tracker.update(both, now=0.0)
    one = tracker.update(both | {"rollout-0": (0.0, report(2.0, row("b", task="web/2")))}, now=1.0)
    assert sorted(one["removed"]) == [0, 1]
    assert [each[:3] for each in one["added"]] == [[3, "rollout-0", "b"]]
    assert tracker.update({"rollout-1": both["rollout-1"]}, now=2.0)["removed"] == [3]
    assert tracker.update({}, now=3.0)["removed"] == [2]
    with pytest.raises(ValueError, match="rollout-0 reports rollouts of 3 fields"):
        tracker.update({"rollout-0": (0.0, report(4.0, ["a", 1, 2]))}, now=4.0)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(live_view, "POLL_SECONDS", 0.05)
    return write_run(tmp_path, str(tiny_model))


@asynccontextmanager
async def client_of(run: Config) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve(run) as (address, _),
        httpx.AsyncClient(base_url=address.partition("/?")[0], timeout=LIMIT) as client,
    ):
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


async def events_of(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("GET", "/api/rollouts") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


async def first_event(events: AsyncIterator[dict[str, Any]], condition: Callable[[dict[str, Any]], Any]) -> Any:
    async with asyncio.timeout(LIMIT):
        async for event in events:
            if condition(event):
                return event
    raise AssertionError("the stream has ended")


async def test_a_viewer_gets_everything_then_changes_and_a_job_without_viewers_reports_nothing(run: Config):
    async with live_job(run) as [worker], client_of(run) as client, aclosing(events_of(client)) as events:
        live = worker.open(episode(3, 1))
        assert not (await asyncio.to_thread(worker.control._connection.status))["roles"]["rollout-0"].get("rollouts")
        start = await first_event(events, lambda event: True)
        assert (start["start"]["fixed"], start["start"]["changing"]) == (list(FIXED), list(CHANGING))
        added = start if start["added"] else await first_event(events, lambda event: event["added"])
        [[number, name, key, *_]] = added["added"]
        assert (name, key) == ("rollout-0", "training-3-1")
        live.set(ACTING)
        changed = await first_event(events, lambda event: event["changed"])
        assert changed["added"] == []
        assert changed["changed"][0][:2] == [number, STATES.index(ACTING)]
        async with aclosing(events_of(client)) as second:
            whole = await first_event(second, lambda event: True)
        assert [each[:3] for each in whole["added"]] == [[number, "rollout-0", "training-3-1"]]
        assert whole["start"]["history"]
        worker.table.close("training", 3)
        assert (await first_event(events, lambda event: event["removed"]))["removed"] == [number]


async def test_a_viewer_that_stops_reading_is_dropped_and_others_still_get_events(
    run: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(live_view, "KEPT_EVENTS", 2)
    async with live_job(run) as [worker], client_of(run) as client, aclosing(events_of(client)) as events:
        task = episode(1, steps=0).task
        tasks = [replace(task, id=letter * 200, website=letter * 200) for letter in "ab"]
        rollouts = [worker.table.open("training", ticket, 0, 1, tasks[0]) for ticket in range(3000)]
        await first_event(events, lambda event: event["added"])
        place = urlsplit(str(client.base_url))
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect((place.hostname, place.port))
            stalled.sendall(f"GET /api/rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            async with asyncio.timeout(LIMIT):
                while "dropped a viewer" not in caplog.text:
                    tasks.reverse()
                    for each in rollouts:  # each becomes another rollout of the same name
                        each.task = tasks[0]
                    await first_event(events, lambda event: event["added"])
        rollouts[7].finish("browser_timeout")
        masked = STATES.index("masked")
        event = await first_event(events, lambda event: masked in [each[1] for each in event["changed"]])
        assert [each[2] for each in event["changed"] if each[1] == masked] == ["browser_timeout"]
        assert caplog.text.count("dropped a viewer") == 1


async def test_viewers_beyond_the_limit_are_refused_and_a_run_without_a_job_says_so(
    run: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live_view, "MAX_VIEWERS", 1)
    async with client_of(run) as client, aclosing(events_of(client)) as events:
        event = await first_event(events, lambda event: event["error"])
        assert (event["error"], event["added"]) == ("the job has not started", [])
        answer = await client.get("/api/rollouts")
        assert (answer.status_code, answer.json()["error"]) == (503, "1 viewers look at the rollouts already")
        assert (await client.post("/api/rollouts")).status_code == 405


async def test_a_rollout_shows_its_episode_so_far_and_no_file_but_its_own(run: Config):
    async with live_job(run) as [worker], client_of(run) as client:
        worker.open(episode(3, 1, steps=2))
        worker.open(episode(3, 0, steps=2))
        name = {"worker": "rollout-0", "key": "training-3-1"}
        async with asyncio.timeout(LIMIT):
            while (found := (await client.get("/api/rollout", params=name)).json())["episode"] is None:
                await asyncio.sleep(0.05)
        assert (found["rollout"]["ticket"], found["rollout"]["state"]) == (3, "waiting for browser")
        assert [step["number"] for step in found["episode"]["steps"]] == [1, 2]
        assert (found["episode"]["images"], found["episode"]["verdict"]) == (3, None)
        image = await client.get("/api/rollout/images/2", params=name)
        assert (image.status_code, image.headers["content-type"]) == (200, "image/png")
        assert (await client.get("/api/rollout/images/9", params=name)).status_code == 404
        assert not running_file(run.run_folder, "rollout-0", "training-3-0").exists(), "nobody looks at the other one"
        for worker_name, key in (("..", "../config"), ("rollout-0", "../00000001"), ("rollout-9", "training-3-1")):
            other = {"worker": worker_name, "key": key}
            found = (await client.get("/api/rollout", params=other)).json()
            assert (found["rollout"], found["episode"]) == (None, None)
            assert (await client.get("/api/rollout/images/0", params=other)).status_code == 404
