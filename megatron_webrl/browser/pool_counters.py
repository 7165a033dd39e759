"""What has happened to the browsers of a fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BrowserPoolCounters:
    """All since the fleet began."""

    launches: int = 0
    failed_launches: int = 0
    crashes: int = 0
    """Browsers that ended uninvited, or whose driver did."""

    hangs: int = 0
    """Browsers that were killed because they did not answer."""

    recycled_by_episodes: int = 0
    recycled_by_memory: int = 0
    recycled_by_stuck_contexts: int = 0
    """Browsers that were replaced because a context did not open or close."""

    sessions: int = 0
    """Sessions that were handed out."""

    sessions_reused: int = 0
    """Those of them that began in the page of an earlier episode."""

    sessions_lost: int = 0
    """Those of them that a crash, a hang or a limit ended."""

    retries: int = 0
    """Sessions that were replaced by another one before the episode began: preparing or resetting them failed."""
