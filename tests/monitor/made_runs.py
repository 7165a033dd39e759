"""Folders of runs as jobs leave them, written by what writes them in a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.launch import run_folder
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import ProcessEvent
from megatron_webrl.track.metrics import UpdateMetrics, UpdateSeconds


def make_run(directory: Path, *overrides: str, name: str = "made", config: str | None = None) -> Config:
    """The folder with its configuration and folders for logs, as a launcher makes it."""
    made = parse_config(config, [f"run.directory={directory}", f"run.name={name}", *overrides])
    (made.run_folder / "logs").mkdir(parents=True)
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
