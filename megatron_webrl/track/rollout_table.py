"""What each rollout of a worker does: what the monitor's page of rollouts shows while someone looks at it.

The worker keeps the table in memory; a change of state costs two assignments. `RolloutTable.encode` is its part of the
worker's report to the control service, which passes the text on without reading it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_webrl.types import TRAINABLE_OUTCOMES, Task, Trajectory

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
    kind: str = ""  # tracking.episode_store.TRAINING, or that of an evaluation
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
        """Its name among the worker's rollouts, and that of its file (running_episodes.py)."""
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
