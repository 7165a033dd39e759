"""The answers of the application, over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.app import RunPages
from megatron_webrl.monitor.status import read_status
from megatron_webrl.track.timeline import FOLDER
from tests.monitor import made_timelines
from tests.monitor.runs import TOKEN, client_of, episode, make_run, serve, store, train_unevenly


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Config:
    config = make_run(tmp_path, f"model.path={tiny_model}", name="look")
    store(config, [episode(1, 0, reward=1.0), episode(1, 1)], [episode(2, 0)], kind="training")
    store(config, [episode(0)], kind="after")
    train_unevenly(config, 3)
    return config


@pytest.fixture
async def served(run: Config) -> AsyncIterator[tuple[httpx.AsyncClient, RunPages]]:
    async with serve(run) as (address, pages), httpx.AsyncClient(base_url=address.partition("/?")[0]) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client, pages


async def get(client: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_nothing_is_shown_without_the_token(run: Config):
    async with serve(run) as (address, _), httpx.AsyncClient() as client:
        base = address.partition("/?")[0]
        for path in ("/", "/api/run", "/static/main.js", "/api/episodes/0/images/0", "/?token=a-wrong-token", "/x"):
            answer = await client.get(base + path)
            assert answer.status_code == 401
            assert "webrl monitor" in answer.text
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        for header in ("Bearer wrong", f"Basic {TOKEN}", "Bearer", "Bearer \xff"):
            sent = {"authorization": header.encode("latin-1")}
            assert (await client.get(f"{base}/api/run", headers=sent)).status_code == 401
        first = await client.get(address)
        assert (first.status_code, first.headers["location"]) == (303, "/")
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert (await client.get(f"{base}/api/run")).status_code == 200, "the cookie is enough"


async def test_the_state_of_a_run_and_what_bounded_an_update_are_those_of_the_commands(
    served: tuple[httpx.AsyncClient, RunPages], tmp_path: Path
):
    client, pages = served
    found = await get(client, "/api/status")
    status = read_status(pages.folder)
    assert found["lines"] | {"state": ""} == status.lines | {"state": ""}
    assert found["tables"]["processes"]["rows"] == [list(row) for row in status.tables()["processes"]["rows"]]
    assert "tracking.timeline=true" in (await get(client, "/api/bound", 404))["error"]
    shutil.copytree(made_timelines.write_run(tmp_path / "timed").run_folder / FOLDER, pages.folder / FOLDER)
    assert (await get(client, "/api/bound"))["version"] == 2
    assert (await get(client, "/api/bound?version=1"))["rows"][0] == ["trainer: wait for groups", 0, 0, 0]
    assert "updates 1 to 2" in (await get(client, "/api/bound?version=9", 404))["error"]


async def test_a_run_that_rolled_back_or_began_again_is_read_again(
    served: tuple[httpx.AsyncClient, RunPages], run: Config, tmp_path: Path
):
    client, pages = served
    found = await get(client, "/api/run")
    assert (found["name"], found["episodes"], found["version"]) == ("look", 4, 3)
    assert [line["version"] for line in await get(client, "/api/updates?after=1")] == [2, 3]
    train_unevenly(run, 2)
    lines = (run.run_folder / "updates.jsonl").read_text().splitlines()
    with (run.run_folder / "updates.jsonl").open("w") as file:  # from version 1 on it went another way
        file.write(lines[0] + "\n" + lines[1].replace('"steps_mean": 2.0', '"steps_mean": 7.0') + "\n")
    pages.refresh()
    found = await get(client, "/api/updates")
    assert [(line["version"], line["steps_mean"]) for line in found] == [(1, 2.0), (2, 7.0)]
    gone = run.run_folder.rename(tmp_path / "gone")
    pages.refresh()
    for path in gone.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    gone.rename(run.run_folder)  # a folder may get the inode of the one before; the configuration comes later
    pages.refresh()
    again = make_run(tmp_path, f"model.path={run.model.path}", name="look")
    store(again, [episode(7, 0)], kind="training")
    train_unevenly(again, 1)
    pages.refresh()
    assert [line["version"] for line in await get(client, "/api/updates")] == [1]
    rows = (await get(client, "/api/episodes"))["rows"]
    assert [row["ticket"] for row in rows] == [7]
    assert (await get(client, f"/api/episodes/{rows[0]['id']}"))["ticket"] == 7


async def test_several_runs_are_served_side_by_side_with_the_settings_in_which_they_differ(run: Config, tmp_path: Path):
    other = make_run(tmp_path / "elsewhere", name="look")  # its folder has the same name
    other.trainer.optimizer.learning_rate = 0.5
    other.tracking.uri = "postgresql://me:a-long-password@db/metrics"
    (other.run_folder / "config.yaml").write_text(yaml.safe_dump(asdict(other)))
    train_unevenly(other, 5)
    async with client_of(run, other) as client:
        assert (await httpx.AsyncClient().get(f"{client.base_url}/runs/look/api/run")).status_code == 401
        found = await get(client, "/api/runs")
        assert [(each["name"], each["version"], each["episodes"]) for each in found["runs"]] == [
            ("look", 3, 4), ("look-2", 5, 0)
        ]  # fmt: skip
        settings = {each["name"]: each["values"] for each in found["settings"]}
        assert settings.keys() == {"model.path", "trainer.optimizer.learning_rate", "tracking.uri"}
        assert settings["tracking.uri"] == ["", "postgresql://***@db/metrics"]
        assert (await get(client, "/runs/look-2/api/run"))["mlflow"] == {
            "uri": "postgresql://***@db/metrics", "run_id": None
        }  # fmt: skip
        for place, version in (("", 3), ("/runs/look", 3), ("/runs/look-2", 5)):
            assert (await get(client, f"{place}/api/run"))["version"] == version
            assert "<!doctype html>" in (await client.get(f"{place}/")).text
        assert (await client.get("/runs/look-2")).headers["location"] == "look-2/"
        assert "no run" in (await get(client, "/runs/unknown/api/run", 404))["error"]
        assert "no run" in (await get(client, "/runs/..%2f..%2fetc/api/run", 404))["error"]


async def test_an_episode_shows_what_the_model_saw_and_its_advantage(served: tuple[httpx.AsyncClient, RunPages]):
    client, _ = served
    rows = (await get(client, "/api/episodes?outcome=success"))["rows"]
    (row,) = rows
    assert row["stored"]
    found = await get(client, f"/api/episodes/{row['id']}")
    assert [step["images"] for step in found["steps"]] == [[0], [0, 1], [1, 2]]
    assert [step["dropped_images"] for step in found["steps"]] == [[], [], [0]]
    assert found["advantage"] == pytest.approx(1.0, abs=1e-4)
    for step in found["steps"]:
        assert "".join(token["text"] for token in step["tokens"]) == step["response"]
    assert found["verdict"]["stages"][0]["decision"] == "yes"
    related = await get(client, f"/api/episodes/{row['id']}/related")
    assert [each["index"] for each in related["group"]] == [0, 1]
    image = await client.get(f"/api/episodes/{row['id']}/images/3")
    assert (image.headers["content-type"], image.content[:4]) == ("image/png", b"\x89PNG")
    assert image.headers["cache-control"] == "no-store", "another run has an image at the same address"
    other = (await get(client, "/api/episodes?kind=after"))["rows"][0]
    assert (await get(client, f"/api/episodes/{other['id']}"))["advantage"] is None, "it has no group"


async def test_wrong_requests_are_answered_with_what_is_wrong(served: tuple[httpx.AsyncClient, RunPages]):
    client, _ = served
    for path, status, words in (
        ("/api/episodes?sort=colour", 400, "colour"),
        ("/api/episodes?steps_min=many", 400, "steps_min=many"),
        ("/api/episodes?limit=inf", 400, "limit=inf"),
        ("/api/episodes?offset=-1", 400, "offset=-1"),
        ("/api/updates?after=x", 400, "after=x"),
        ("/api/episodes/99", 404, "episode 99"),
        ("/api/episodes/0/images/9", 404, "4 screenshots"),
    ):
        assert words in (await get(client, path, status))["error"]
    assert (await client.post("/api/run")).status_code == 405
    assert (await client.get("/static/../app.py")).status_code == 404


async def test_an_episode_that_was_deleted_or_damaged_is_said_to_be(served: tuple[httpx.AsyncClient, RunPages]):
    client, pages = served
    first, second = sorted((pages.config.run_folder / "episodes" / "rollout-0").glob("*.records"))[:2]
    first.unlink()
    content = bytearray(second.read_bytes())
    content[400] ^= 1
    second.write_bytes(content)
    rows = (await get(client, "/api/episodes?sort=ticket&kind=training"))["rows"]
    assert [row["stored"] for row in rows] == [False, False, True]
    assert "tracking.episodes_gib" in (await get(client, f"/api/episodes/{rows[0]['id']}", 410))["error"]
    assert "checksum" in (await get(client, f"/api/episodes/{rows[2]['id']}", 500))["error"]


async def test_long_texts_are_cut_and_lone_surrogates_and_rewards_that_are_no_numbers_survive(run: Config):
    hostile = replace(episode(9), instruction="x" * 10_000_000 + "\ud800", page_reward=float("nan"), outcome="failure")
    store(run, [hostile])
    async with client_of(run) as client:
        row = (await get(client, "/api/episodes?ticket_min=9"))["rows"][0]
        assert len(row["instruction"]) == 500
        answer = await client.get(f"/api/episodes/{row['id']}")
    found = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["page_reward"] is None
    assert len(found["instruction"]) < 101_000
    assert found["instruction"].endswith("more characters)")
