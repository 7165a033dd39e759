"""The unfinished episodes that someone looks at, as files of the run: episodes/<worker>/running/<key>.record."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.liveness import VIEWED
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.record_file import RecordFileWriter
from megatron_webrl.track.episode_store import FOLDER
from megatron_webrl.track.rollout_table import RolloutTable
from megatron_webrl.types import Trajectory
from megatron_webrl.util.disk_faults import continue_without

log = logging.getLogger(__name__)

RUNNING_FOLDER = "running"


def running_file(run_folder: Path, worker: str, key: str) -> Path:
    """Where a worker writes an unfinished episode."""
    return run_folder / FOLDER / worker / RUNNING_FOLDER / f"{key}.record"


class RunningEpisodes:
    """Reports a worker's rollouts, and writes those episodes that someone looks at when they have gained something.

    Belongs to the worker's event loop. A disk that fails costs the view, and no more.
    """

    def __init__(self, config: Config, control: ControlClient, table: RolloutTable) -> None:
        self._config, self._control, self._table = config, control, table
        self._folder = running_file(config.run_folder, control.role, "").parent
        self._written: dict[str, tuple[int, int]] = {}  # tries and images by key
        self._writing: asyncio.Task[None] | None = None
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier instance
        control.report_rollouts(table.encode)

    def poll(self) -> None:
        """Start a write that is due. Never waits."""
        if self._writing is not None and not self._writing.done():
            return
        viewed = (self._control.get_json(VIEWED) or {}).get("episodes", ())
        mine = {key for worker, _, key in (each.partition("/") for each in viewed) if worker == self._control.role}
        if not mine and not self._written:
            return
        episodes: dict[str, Trajectory] = {}
        for key in mine:
            live = self._table.get(key)
            if live is not None and live.episode_so_far is not None:
                episode = live.episode_so_far()
                if self._written.get(key) != (size := (live.tries, len(episode.images) + len(episode.steps))):
                    episodes[key], self._written[key] = episode, size
        gone = self._written.keys() - mine
        if episodes or gone:
            self._written = {key: size for key, size in self._written.items() if key in mine}
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, episodes, gone))

    async def close(self) -> None:
        """Remove the files."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, episodes: dict[str, Trajectory], gone: set[str]) -> None:
        with continue_without(str(self._folder)):
            for key in gone:
                running_file(self._config.run_folder, self._control.role, key).unlink(missing_ok=True)
            for key, episode in episodes.items():
                with RecordFileWriter(running_file(self._config.run_folder, self._control.role, key)) as file:
                    file.write(encode_trajectory(episode))
