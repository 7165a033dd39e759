"""Which roles are alive and make progress, what they last reported, and what someone looks at.

Pure: the caller passes the time.

A role that the service has not heard for the heartbeat timeout is silent. Neither a pause of the service itself nor its
restart counts as silence. These facts are not durable: roles report them again within a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

VIEWED = "rollouts/viewed"  # the fact that workers follow: None, or {"episodes": ["rollout-0/KEY", ...]}
VIEW_SECONDS = 10.0  # after which a viewer that has not asked again looks no longer
MAX_EPISODES = 8
PAUSE_SECONDS = 2.0  # a longer time between two calls of `silent_roles` is a pause of the service


@dataclass
class RoleReport:
    """What a role last reported."""

    heard_at: float
    beats: int = 0  # heartbeats so far
    progress: str = ""  # changes while the role makes progress; empty: none yet
    progress_at: float = 0.0  # when it last changed
    status: str = ""  # status line
    load: dict[str, Any] = field(default_factory=dict)  # running sums of an engine
    rollouts: str = ""  # of a worker while someone looks (track/live_rollouts.py)
    sender: str = ""  # name of the process
    cleared: bool = False  # its supervisor restarts it: not lost before its next heartbeat


class Liveness:
    """Reports by role, and what is looked at."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds  # run.heartbeat_timeout_seconds
        self.roles: dict[str, RoleReport] = {}
        self._checked_at: float | None = None
        self._viewed_until = float("-inf")
        self._episodes: dict[str, float] = {}  # until when each is looked at

    def report(self, role: str, heard_at: float, fields: dict[str, Any]) -> None:
        """Take in a heartbeat with the fields of RoleReport that have changed.

        One of a cleared role's process, which has ended, may come late.
        """
        known, sender = self.roles.setdefault(role, RoleReport(heard_at)), fields.get("sender", "")
        if known.cleared and sender == known.sender:
            return
        known.heard_at, known.beats = max(known.heard_at, heard_at), known.beats + 1
        known.sender, known.cleared = sender, False
        if (progress := fields.get("progress", known.progress)) != known.progress:
            known.progress, known.progress_at = progress, heard_at
        known.status, known.load = fields.get("status", known.status), fields.get("load", known.load)
        known.rollouts = fields.get("rollouts", "")

    def clear(self, role: str) -> None:
        """A supervisor restarts a role."""
        if (known := self.roles.get(role)) is not None:
            known.progress, known.cleared = "", True

    def silent_roles(self, now: float) -> dict[str, bool]:
        """The silent roles, and whether each was cleared. Call this several times a second."""
        paused = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if paused > PAUSE_SECONDS:
            for known in self.roles.values():
                known.heard_at = min(now, known.heard_at + paused)
                known.progress_at = min(now, known.progress_at + paused)
        return {role: each.cleared for role, each in self.roles.items() if now - each.heard_at > self.timeout_seconds}

    def to_json(self, now: float) -> dict[str, dict[str, Any]]:
        """By role: its report, with ages in seconds instead of times."""
        return {
            role: {
                "beats": known.beats,
                "silent_seconds": round(now - known.heard_at, 3),
                "progress": known.progress,
                "idle_seconds": round(now - known.progress_at, 3) if known.progress else 0.0,
                "status": known.status,
                "load": known.load,
                "cleared": known.cleared,
            }
            for role, known in self.roles.items()
        }

    def rollouts(self, now: float) -> dict[str, tuple[float, str]]:
        """By worker that is alive: the age of its report in seconds, and its rollouts; no worker that reports none."""
        return {
            role: (round(now - known.heard_at, 3), known.rollouts)
            for role, known in self.roles.items()
            if known.rollouts and not known.cleared and now - known.heard_at <= self.timeout_seconds
        }

    def look(self, now: float, episodes: Iterable[str]) -> None:
        """Someone looks at the rollouts, and at these episodes, of which the last MAX_EPISODES count."""
        self._viewed_until = now + VIEW_SECONDS
        for each in episodes:
            self._episodes.pop(each, None)
            self._episodes[each] = self._viewed_until
        self._episodes = dict(list(self._episodes.items())[-MAX_EPISODES:])

    def viewed(self, now: float) -> dict[str, Any] | None:
        """The value of VIEWED: without viewers, who ask again within a second, workers report no rollouts."""
        if now > self._viewed_until:
            return None
        return {"episodes": sorted(each for each, until in self._episodes.items() if now <= until)}
