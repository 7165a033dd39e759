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
from megatron_webrl.monitor.live_view import read_reports
from megatron_webrl.track.live_rollouts import ACTING, CHANGING, FIXED, STATES, running_file
from tests.monitor.live_job import live_job
from tests.monitor.runs import TOKEN, episode, serve, write_run

LIMIT = 60.0


def row(key: str, state: int = 0, since: float = 5.0, task: str = "web/1") -> list[Any]:
    return [key, "training", 1, 0, 4, task, "shop.test", "easy", 9, state, "", 2, 7, 1, since]


def report(now: float, *rows: list[Any]) -> str:
    return json.dumps([now, rows])


def test_times_of_rows_are_those_of_the_viewers_clock_and_another_form_is_refused():
    reports = {"rollout-0": (0.5, report(10.0, row("a"), row("b"))), "rollout-1": (0.0, report(1.0, row("a")))}
    found = read_reports(reports, now=1000.0)
    assert list(found) == [("rollout-0", "a"), ("rollout-0", "b"), ("rollout-1", "a")]
    assert found["rollout-0", "a"] == row("a", since=1000.0 - 0.5 - 10.0 + 5.0)
    with pytest.raises(ValueError, match="rollout-0 reports rollouts of 3 fields"):
        read_reports({"rollout-0": (0.0, report(4.0, ["a", 1, 2]))}, now=4.0)


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


async def test_a_viewer_follows_the_rollouts_and_a_job_without_viewers_reports_nothing(run: Config):
    async with live_job(run) as [worker], client_of(run) as client, aclosing(events_of(client)) as events:
        live = worker.open(episode(3, 1))
        assert not (await asyncio.to_thread(worker.control._connection.status))["roles"]["rollout-0"].get("rollouts")
        start = await first_event(events, lambda event: True)
        assert start["start"]["fields"] == [*FIXED, *CHANGING]
        state = 1 + len(FIXED) + CHANGING.index("state")
        event = start if start["rows"] else await first_event(events, lambda event: event["rows"])
        assert event["rows"][0][:2] == ["rollout-0", "training-3-1"]
        live.set(ACTING)
        await first_event(events, lambda event: event["rows"][0][state] == STATES.index(ACTING))
        async with aclosing(events_of(client)) as second:
            whole = await first_event(second, lambda event: True)
        assert [each[:2] for each in whole["rows"]] == [["rollout-0", "training-3-1"]]
        assert whole["start"]["history"]
        worker.table.close("training", 3)
        await first_event(events, lambda event: not event["rows"])


async def test_a_viewer_that_stops_reading_is_dropped_and_others_still_get_events(
    run: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(live_view, "KEPT_EVENTS", 2)
    async with live_job(run) as [worker], client_of(run) as client, aclosing(events_of(client)) as events:
        task = episode(1, steps=0).task
        task = replace(task, id="a" * 200, website="b" * 200)
        rollouts = [worker.table.open("training", ticket, 0, 1, task) for ticket in range(3000)]
        await first_event(events, lambda event: event["rows"])
        place = urlsplit(str(client.base_url))
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect((place.hostname, place.port))
            stalled.sendall(f"GET /api/rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            async with asyncio.timeout(LIMIT):
                while "dropped a viewer" not in caplog.text:
                    await first_event(events, lambda event: event["rows"])
        rollouts[7].finish("browser_timeout")
        await first_event(events, lambda event: [row[11] for row in event["rows"] if row[11]] == ["browser_timeout"])
        assert caplog.text.count("dropped a viewer") == 1


async def test_viewers_beyond_the_limit_are_refused_and_a_run_without_a_job_says_so(
    run: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live_view, "MAX_VIEWERS", 1)
    async with client_of(run) as client, aclosing(events_of(client)) as events:
        event = await first_event(events, lambda event: event["error"])
        assert (event["error"], event["rows"]) == ("the job has not started", [])
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
