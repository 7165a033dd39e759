"""Websites that blocked the agent: training draws none of their tasks for tasks.block_hours."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_webrl.tasks.sampler.knowledge import BLOCK, SamplerLog
from megatron_webrl.types import BLOCKED, Group
from megatron_webrl.util import history

log = logging.getLogger(__name__)

FILE = "blocklist.jsonl"


class BlockList:
    """Blocks websites in a sampler log: it applies to the tickets that are admitted from the next state on.

    A website is blocked by the first group with a blocked episode; later groups do not prolong it. Wall-clock time
    counts, so that a block also expires while no job runs.
    """

    def __init__(
        self, sampler_log: SamplerLog, hours: float, path: Path, clock: Callable[[], float] = time.time
    ) -> None:
        """`hours`: of a block; 0: none, and those of a checkpoint end. `path`: every event is appended as a line."""
        self._log, self._seconds, self._path, self._clock = sampler_log, 3600 * hours, path, clock
        self._added = 0

    def record_group(self, group: Group) -> None:
        """Block the website of a complete group, trained or dropped, if it blocked any of its episodes."""
        website = next((each.task.website for each in group.trajectories if each.outcome == BLOCKED), "")
        if not website or not self._seconds:
            return
        if self._log.blocks.get(website, self._log.end) is None:
            until = self._clock() + self._seconds
            self._log.append(BLOCK, website, until)
            self._added += 1
            self._write(website, "blocked", until=round(until, 3), ticket=group.ticket)

    def restore(self) -> None:
        """Block the websites that the file has as blocked: a run may resume from a checkpoint before these events."""
        latest: dict[str, dict[str, Any]] = {}
        for event in history.read(self._path) if self._seconds else ():
            latest[event["website"]] = event
        for website, event in latest.items():
            lasts = event["event"] == "blocked" and event["until"] > self._clock()
            if lasts and self._log.blocks.get(website, self._log.end) is None:
                self._log.append(BLOCK, website, event["until"])

    def remove_expired(self) -> None:
        """Unblock the websites whose time is over."""
        for website, until in self._log.blocks.all(self._log.end).items():
            if until <= self._clock() or not self._seconds:
                self._log.append(BLOCK, website, None)
                self._write(website, "unblocked", until=round(until, 3), ticket=None)

    def pop_metrics(self) -> dict[str, float]:
        """Websites blocked at present, and those added since the last call."""
        added, self._added = self._added, 0
        blocked = len(self._log.blocks.all(self._log.end))
        return {"blocked_websites": float(blocked), "block_list/added": float(added)}

    def _write(self, website: str, event: str, **fields: Any) -> None:
        line = {"time": round(self._clock(), 3), "website": website, "event": event, **fields}
        try:
            history.append_shared(self._path, [json.dumps(line).encode() + b"\n"])
        except OSError as error:  # the block holds in this job, and in its checkpoints
            log.warning("%s cannot be written: %s; it lacks %s, %s", self._path, error, website, event)
