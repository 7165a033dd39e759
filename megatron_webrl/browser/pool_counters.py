"""Counters of a browser pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BrowserPoolCounters:
    """Totals since the pool started."""

    launches: int = 0
    failed_launches: int = 0
    crashes: int = 0  # browsers that ended unexpectedly, or whose driver did
    hangs: int = 0  # browsers killed because they did not answer
    recycled_by_episodes: int = 0
    recycled_by_memory: int = 0
    recycled_by_stuck_contexts: int = 0  # browsers replaced because a context did not open or close
    sessions: int = 0  # handed out
    sessions_reused: int = 0  # begun in the page of an earlier episode
    sessions_lost: int = 0  # ended by a crash, a hang or a time limit
    recordings: int = 0  # episodes whose recording was saved
    failed_recordings: int = 0  # episodes whose recording could not be saved
    retries: int = 0  # sessions replaced before their episode began, because preparing or resetting them failed
