"""What someone looks at: whether workers report their rollouts, and which unfinished episodes they write to files.

Pure: the caller passes the time. Not durable: viewers ask again within a second. A job without viewers reports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

VIEWED = "rollouts/viewed"  # the fact that workers subscribe to: None, or {"episodes": ["rollout-0/KEY", ...]}
VIEW_SECONDS = 10.0  # after which a viewer that has not asked again looks no longer
MAX_EPISODES = 8


class Viewers:
    """All viewers of a job."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._episodes: dict[str, float] = {}  # until when each is looked at

    def look(self, now: float, episodes: Iterable[str]) -> None:
        """Someone looks at the rollouts, and at these episodes, of which the last MAX_EPISODES count."""
        self._until = now + VIEW_SECONDS
        for each in episodes:
            self._episodes.pop(each, None)
            self._episodes[each] = self._until
        self._episodes = dict(list(self._episodes.items())[-MAX_EPISODES:])

    def fact(self, now: float) -> dict[str, Any] | None:
        """The value of VIEWED."""
        if now > self._until:
            return None
        return {"episodes": sorted(each for each, until in self._episodes.items() if now <= until)}
