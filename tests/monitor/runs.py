"""A run's folder with stored episodes, written by the product's own writers; and its pages, served."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import yaml

from megatron_webrl.config.schema import Config
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.monitor.access import MonitorAccess
from megatron_webrl.monitor.app import RunPages, RunSet
from megatron_webrl.track.episodes import FILE, EpisodeStore, episode_line
from megatron_webrl.types import Action, JudgeStage, Trajectory, Verdict
from megatron_webrl.util.history import History
from tests.trajectories import screenshot, trajectory

TOKEN = "a-token-of-the-tests"


def write_run(directory: Path, model: str = "nowhere", name: str = "look") -> Config:
    """The folder of a run without episodes; returns its configuration."""
    config = Config()
    config.run.directory, config.run.name, config.model.path = str(directory), name, model
    config.run_folder.mkdir(parents=True, exist_ok=True)
    (config.run_folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    return config


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
    images = tuple(screenshot(ticket + n, 320, 240) for n in range(steps + 1))
    stage = JudgeStage("supported", "1", "yes" if reward else "no", "The page shows it.", "d" * 64, "judge-model")
    verdict = Verdict(made.outcome, "judge", "rubric", reason="fact 1 is missing", stages=(stage,), calls=1)
    made = replace(made, steps=changed, images=images, verdict=verdict, end_reason="answer")
    return replace(made, **fields)  # type: ignore[arg-type]


def write_updates(config: Config, count: int) -> None:
    """Lines of updates.jsonl with what the run page draws."""
    with (config.run_folder / "updates.jsonl").open("w") as file:
        for version in range(1, count + 1):
            line = {
                "version": version, "groups": 8, "finished_at": 1e9 + 60.0 * version,
                "reward_mean": version / count, "steps_mean": 4.0, "response_tokens_mean": 31.5,
                "staleness_mean": 0.5, "staleness_max": 2, "clip_fraction": 0.01, "logprob_mismatch_max": 1e-6,
                "tokens_per_second": 900.0, "seconds": {"rollout": 9.0, "train": 2.0, "sync": 0.1, "wait": 1.5},
                "extra": {"rollout_success_rate": version / count, "entropy": 1.0 / version, "dropped/stale": 3.0,
                          "difficulty/easy/success_rate": 0.5, "memory/trainer_gib": 1.5, "memory/worker_gib": 2.5},
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


@asynccontextmanager
async def serve(*configs: Config) -> AsyncIterator[tuple[str, RunPages]]:
    """The pages of runs on a free port, from this process; yields their address with the token, and the first run's."""
    runs = RunSet([config.run_folder for config in configs])
    runs.refresh()
    listener = Listener(ListenAddress("127.0.0.1", 0))
    async with run_http_server(MonitorAccess(runs.app(), TOKEN, "webrl-test"), listener):
        yield f"{listener.url}/?token={TOKEN}", next(iter(runs.pages.values()))
