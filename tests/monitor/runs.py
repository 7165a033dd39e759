"""Folders of runs as jobs leave them, written by the product's own writers; and their pages, served."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.launch import run_folder
from megatron_webrl.monitor.access import MonitorAccess
from megatron_webrl.monitor.app import RunPages, RunSet
from megatron_webrl.track import events, summary
from megatron_webrl.track.episodes import FILE, EpisodeStore, episode_line
from megatron_webrl.track.events import ProcessEvent
from megatron_webrl.track.metrics import UpdateMetrics, UpdateSeconds
from megatron_webrl.types import Action, JudgeStage, Trajectory, Verdict
from megatron_webrl.util.history import History
from tests.trajectories import screenshot, trajectory

TOKEN = "a-token-of-the-tests"


def make_run(directory: Path, *overrides: str, name: str = "made", config: str | None = None) -> Config:
    """The folder with its configuration and one for logs, as a launcher makes it."""
    made = parse_config(config, [f"run.directory={directory}", f"run.name={name}", *overrides])
    (made.run_folder / "logs").mkdir(parents=True, exist_ok=True)
    save_config(made, run_folder.config_path(made))
    return made


def begin_job(config: Config, seconds: float) -> None:
    """Pretend that the last job started `seconds` ago."""
    with (config.run_folder / events.FILE).open("ab") as file:
        file.write(ProcessEvent(time.time() - seconds, events.JOB, events.STARTED).to_json_line())


def updates(count: int, ended: float, seconds: float = 36.0, wait: float = 9.0, **extra: float) -> list[dict[str, Any]]:
    """`count` updates of `seconds` each, the last finished at `ended`, with `wait` seconds of waiting in each."""
    return [
        UpdateMetrics(
            version=version, groups=8, reward_mean=0.5, steps_mean=2.0, response_tokens_mean=8.0, staleness_mean=1.5,
            staleness_max=2, clip_fraction=0.0, logprob_mismatch_max=None, logprob_mismatch_tokens=0,
            tokens_per_second=1000.0,
            seconds=UpdateSeconds(rollout=20.0, train=seconds - wait - 1.0, sync=1.0, wait=wait, image_wait=0.0),
            finished_at=ended - (count - version) * seconds,
            extra={"rollout_success_rate": 0.25, "rollout_episodes": 64.0, "masked_episodes": 2.0, "dropped/stale": 6.0,
                   **extra},
        ).to_json()
        for version in range(1, count + 1)
    ]  # fmt: skip


def train(config: Config, count: int, **extra: float) -> None:
    """Write `count` updates, the last one finished now."""
    summary.open_updates(config.run_folder).append(*updates(count, time.time(), **extra))


def train_unevenly(config: Config, count: int) -> None:
    """Write `count` updates, one a minute, whose reward grows up to 1."""
    lines = updates(count, 1e9 + 60.0 * count, 60.0, **{"memory/trainer_gib": 1.5, "memory/worker_gib": 2.5})
    for line in lines:
        line["reward_mean"] = line["extra"]["rollout_success_rate"] = line["version"] / count
        line["seconds"] |= {"train": 2.0, "sync": 0.1, "wait": 1.5}
    (config.run_folder / "updates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def store(config: Config, *groups: Sequence[Trajectory], kind: str = "training", became: str | None = None) -> None:
    """Store groups as a worker does, and log them as the trainer does."""
    stored = EpisodeStore.of_worker(config, "rollout-0")
    log = History(config.run_folder / FILE)
    for group in groups:
        stored.add(group, kind)
        for each in group if kind == "training" else ():
            log.append(episode_line(each, became, version=1))
    stored.close()
    log.close()


def episode(ticket: int, index: int = 0, *, steps: int = 3, reward: float = 0.0, **fields: object) -> Trajectory:
    """An episode whose prompts hold up to two screenshots, with a click, a typed text and a drag."""
    made = trajectory(ticket, index, steps=steps, reward=reward, version=ticket)
    actions = [
        Action("left_click", (500, 250)),
        Action("type", (100, 900), text="42 shoes"),
        Action("drag", (100, 100), end_coordinate=(900, 800)),
    ]
    changed = tuple(
        replace(
            step,
            images=np.arange(max(0, n - 1), n + 1, dtype=np.int32),
            image_grids=np.ones((min(n + 1, 2), 3), np.int32),
            action=actions[n % 3],
            title=f"Page {n}",
            url=f"http://shop.localhost/{n}",
            page_changed=n % 2 == 0,
        )
        for n, step in enumerate(made.steps)
    )
    images = tuple(_picture(ticket + n) for n in range(steps + 1))
    stage = JudgeStage("supported", "1", "yes" if reward else "no", "The page shows it.", "d" * 64, "judge-model")
    verdict = Verdict(made.outcome, "judge", "rubric", reason="fact 1 is missing", stages=(stage,), calls=1)
    made = replace(made, steps=changed, images=images, verdict=verdict, end_reason="answer")
    return replace(made, **fields)  # type: ignore[arg-type]


@lru_cache
def _picture(seed: int) -> bytes:
    return screenshot(seed, 320, 240)


@asynccontextmanager
async def serve(*configs: Config) -> AsyncIterator[tuple[str, RunPages]]:
    """The pages of runs on a free port, from this process; yields their address with the token, and the first run's."""
    runs = RunSet([config.run_folder for config in configs])
    runs.refresh()
    listener = Listener(ListenAddress("127.0.0.1", 0))
    async with run_http_server(MonitorAccess(runs.app(), TOKEN, "webrl-test"), listener):
        yield f"{listener.url}/?token={TOKEN}", next(iter(runs.pages.values()))


@asynccontextmanager
async def client_of(*configs: Config) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the pages of runs; it has the token."""
    async with serve(*configs) as (address, _), httpx.AsyncClient(base_url=address.partition("/?")[0]) as client:
        client.headers["authorization"], client.timeout = f"Bearer {TOKEN}", httpx.Timeout(60.0)
        yield client
