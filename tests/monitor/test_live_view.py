"""What a viewer of a running job's rollouts gets: everything, then changes; and one rollout with its episode so far."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor import live_view
from megatron_webrl.monitor.live_view import read_reports
from megatron_webrl.track.live_rollouts import ACTING, CHANGING, FIXED, STATES, running_file
from tests.monitor.live_job import live_job
from tests.monitor.runs import client_of, episode, make_run

LIMIT = 60.0


def test_times_of_rows_are_those_of_the_viewers_clock_and_another_form_is_refused():
    def row(key: str, since: float = 5.0) -> list[Any]:
        return [key, "training", 1, 0, 4, "web/1", "shop.test", "easy", 9, 0, "", 2, 7, 1, since]

    reports = {"rollout-0": (0.5, json.dumps([10.0, [row("a"), row("b")]])), "rollout-1": (0.0, "[1.0, []]")}
    found = read_reports(reports, now=1000.0)
    assert list(found) == [("rollout-0", "a"), ("rollout-0", "b")]
    assert found["rollout-0", "a"] == row("a", since=1000.0 - 0.5 - 10.0 + 5.0)
    with pytest.raises(ValueError, match="rollout-0 reports rollouts of 3 fields"):
        read_reports({"rollout-0": (0.0, '[4.0, [["a", 1, 2]]]')}, now=4.0)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(live_view, "POLL_SECONDS", 0.05)
    return make_run(tmp_path, f"model.path={tiny_model}", name="look")


async def first_answer(client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], Any], after: float = 0) -> Any:
    """The first answer that meets a condition."""
    async with asyncio.timeout(LIMIT):
        while not condition(answer := (await client.get("/api/rollouts", params={"after": after})).json()):
            await asyncio.sleep(0.05)
    return answer


async def test_a_viewer_follows_the_rollouts_and_a_job_without_viewers_reports_nothing(run: Config):
    async with live_job(run) as [worker], client_of(run) as client:
        live = worker.open(episode(3, 1))
        assert not (await asyncio.to_thread(worker.control._connection.status))["roles"]["rollout-0"].get("rollouts")
        found = await first_answer(client, lambda answer: answer["rows"])
        assert found["fields"] == [*FIXED, *CHANGING]
        assert [each[:2] for each in found["rows"]] == [["rollout-0", "training-3-1"]]
        state = 1 + len(FIXED) + CHANGING.index("state")
        live.set(ACTING)
        await first_answer(client, lambda answer: answer["rows"][0][state] == STATES.index(ACTING))
        before = (await first_answer(client, lambda answer: answer["history"]))["history"][-1][0]
        later = await first_answer(client, lambda answer: answer["history"], after=before)
        assert later["history"][0][0] > before
        worker.table.close("training", 3)
        await first_answer(client, lambda answer: not answer["rows"])


async def test_viewers_share_an_answer_and_a_run_without_a_job_says_so(run: Config, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(live_view, "POLL_SECONDS", LIMIT)
    query = live_view.query
    monkeypatch.setattr(live_view, "query", lambda *given, **more: asked.append(given) or query(*given, **more))
    async with client_of(run) as client:
        answers = await asyncio.gather(*(client.get("/api/rollouts") for _ in range(5)))
        assert {(each.json()["error"], str(each.json()["rows"])) for each in answers} == {
            ("the job has not started", "[]")
        }
        assert len(asked) == 1
        refused = await client.get("/api/rollouts?after=x")
        assert (refused.status_code, refused.json()["error"]) == (400, "after=x is not a number")
    (run.run_folder / "summary.json").write_text("{}")
    async with client_of(run) as client:
        assert (await client.get("/api/rollouts")).json()["error"] == "the run has ended"


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
        for number, status in ((2, 200), (9, 404)):
            assert (await client.get(f"/api/rollout/images/{number}", params=name)).status_code == status
        assert not running_file(run.run_folder, "rollout-0", "training-3-0").exists(), "nobody looks at the other one"
        for worker_name, key in (("..", "../config"), ("rollout-0", "../00000001"), ("rollout-9", "training-3-1")):
            other = {"worker": worker_name, "key": key}
            found = (await client.get("/api/rollout", params=other)).json()
            assert (found["rollout"], found["episode"]) == (None, None)
            assert (await client.get("/api/rollout/images/0", params=other)).status_code == 404
