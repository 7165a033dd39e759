"""What each rollout of a worker does: what the monitor's page of rollouts shows while someone looks at it.

The worker keeps a table in memory; a change of state costs two assignments. `RolloutTable.encode` is its part of the
worker's report to the control service, which passes the text on without reading it. The unfinished episodes that
someone looks at are files of the run: episodes/<worker>/running/<key>.record.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.liveness import VIEWED
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.track.episodes import FOLDER
from megatron_webrl.types import TRAINABLE_OUTCOMES, Task, Trajectory
from megatron_webrl.util.atomic_file import continue_without

log = logging.getLogger(__name__)

RUNNING_FOLDER = "running"
WAITING_FOR_BROWSER, NAVIGATING, OBSERVING = "waiting for browser", "navigating", "observing"
WAITING_FOR_STEP, WAITING_FOR_MODEL, ACTING = "waiting for step", "waiting for model", "acting"
JUDGING, SUCCESS, FAILURE, MASKED = "judging", "success", "failure", "masked"
STATES = (
    WAITING_FOR_BROWSER, NAVIGATING, OBSERVING, WAITING_FOR_MODEL, ACTING, JUDGING, WAITING_FOR_STEP, SUCCESS, FAILURE,
    MASKED,
)  # fmt: skip
"""In a row a state is its number here."""
FIXED = ("key", "kind", "ticket", "index", "group_size", "task", "site", "difficulty", "limit")
CHANGING = ("state", "reason", "step", "version", "tries", "since")
"""Fields of a row, in order: those that stay, and those that change. `since`: monotonic time of the worker."""
MAX_CHARACTERS = 120  # of a text in a row


@dataclass
class LiveRollout:
    """One rollout of the table. Belongs to the worker's event loop; other threads may read it."""

    task: Task
    kind: str = ""  # track.episodes.TRAINING, or that of an evaluation
    ticket: int = 0
    index: int = 0
    group_size: int = 1
    state: str = WAITING_FOR_BROWSER
    since: float = field(default_factory=time.monotonic)
    reason: str = ""  # of a mask
    step: int = 0  # completed steps
    version: int | None = None  # newest policy version of the last response
    tries: int = 0
    episode_so_far: Callable[[], Trajectory] | None = None  # once the agent has a browser

    @property
    def key(self) -> str:
        """Its name among the worker's rollouts, and that of its file."""
        return f"{self.kind}-{self.ticket}-{self.index}"

    def set(self, state: str) -> None:
        """Enter a state."""
        self.state, self.since = state, time.monotonic()

    def start_try(self) -> None:
        """Begin another try at the episode: it waits for a browser."""
        self.tries, self.step, self.version, self.reason, self.episode_so_far = self.tries + 1, 0, None, "", None
        self.set(WAITING_FOR_BROWSER)

    def end_step(self, versions: list[int]) -> None:
        """Count a step, whose observation the agent takes in. `versions`: of the tokens of its response."""
        self.step, self.version = self.step + 1, max(versions, default=None)
        self.set(OBSERVING)

    def finish(self, outcome: str) -> None:
        """Enter the state of an outcome, which stays until the table drops the rollout."""
        masked = outcome not in TRAINABLE_OUTCOMES
        self.reason = outcome if masked else ""
        self.set(MASKED if masked else outcome)

    def row(self) -> list[str | int | float | None]:
        """Values of FIXED and CHANGING."""
        task = self.task
        return [
            self.key, self.kind, self.ticket, self.index, self.group_size, task.id[:MAX_CHARACTERS],
            (task.website or task.environment)[:MAX_CHARACTERS], task.difficulty[:MAX_CHARACTERS], task.max_steps,
            STATES.index(self.state), self.reason[:MAX_CHARACTERS], self.step, self.version, self.tries,
            round(self.since, 2),
        ]  # fmt: skip


class RolloutTable:
    """The rollouts of a worker, by key: running ones, and those of a group that has running ones."""

    def __init__(self) -> None:
        self._rollouts: dict[str, LiveRollout] = {}

    def open(self, kind: str, ticket: int, index: int, group_size: int, task: Task) -> LiveRollout:
        """The rollout of an episode, which another try finds again."""
        rollout = LiveRollout(task, kind, ticket, index, group_size)
        return self._rollouts.setdefault(rollout.key, rollout)

    def close(self, kind: str, ticket: int, index: int | None = None) -> None:
        """Drop an episode; without `index` all of a group."""
        for key, each in list(self._rollouts.items()):
            if (each.kind, each.ticket) == (kind, ticket) and index in (None, each.index):
                del self._rollouts[key]

    def get(self, key: str) -> LiveRollout | None:
        return self._rollouts.get(key)

    def encode(self) -> str:
        """Time of the worker's clock and all rows, as JSON. May be called by any thread."""
        rows = [each.row() for each in list(self._rollouts.values())]
        return json.dumps([round(time.monotonic(), 2), rows], separators=(",", ":"))


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
