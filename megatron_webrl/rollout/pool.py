"""The rollout worker: one engine, its agents and browsers. It pulls tickets when it has room.

Agents outlive iterations and weight updates: a group continues while the engine takes new weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_webrl.config import Config
from megatron_webrl.control import POLL_SECONDS, Control, Start, Stopped
from megatron_webrl.ring.errors import RingFull
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.engine import Engine
from megatron_webrl.rollout.episodes import Episodes
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

RING_POLL_SECONDS = 1.0


@dataclass
class Pool:
    """Runs groups until the job ends; counts every finished episode."""

    config: Config
    control: Control
    ring: Ring
    engine: Engine
    episodes: Episodes
    name: str
    start: Start | None = None
    taken_version: int = -1  # the engine's own weights are nobody's version: the first offer is always taken
    finished: int = 0
    written: int = 0
    _groups: set[asyncio.Task[None]] = field(default_factory=set)
    _writes: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: bool = False

    async def run(self) -> None:
        """Work until the job has ended; then leave unfinished episodes and report the account."""
        try:
            while True:
                self.control.check(("trainer-0",))
                self._raise_failed()
                await self._refresh_weights()
                self._fill()
                self.control.report(
                    f"version {self.engine.version}: {len(self._groups)} groups running, {self.finished} episodes done"
                )
                await asyncio.sleep(POLL_SECONDS)
        except Stopped:
            pass
        finally:
            self._ended = True
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, *self._writes, return_exceptions=True)
        # Finished episodes of unfinished groups never reach the ring: the trainer counts them as waiting.
        self.control.put(f"final/{self.name}", {"finished": self.finished, "held": self.finished - self.written})

    def _fill(self) -> None:
        self.start = self.start or self.control.job_start()
        while self.start is not None and len(self._groups) < self.config.rollout.groups_in_flight:
            position = self.control.take_position()
            if position is None:
                return
            self._groups.add(asyncio.create_task(self._run_group(self.start.ticket(position), self.start.incarnation)))

    async def _run_group(self, ticket: int, incarnation: int) -> None:
        size = self.config.rollout.group_size
        trajectories = await asyncio.gather(*(self._run_episode(ticket, index, incarnation) for index in range(size)))
        await self._write(trajectories)

    async def _run_episode(self, ticket: int, index: int, incarnation: int) -> Trajectory:
        trajectory = await self.episodes.run(self.engine, ticket, index, incarnation)
        self.finished += 1
        return trajectory

    async def _write(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            # In a thread: a full ring holds back this group alone.
            writing = asyncio.create_task(asyncio.to_thread(self._write_one, trajectory))
            self._writes.add(writing)
            writing.add_done_callback(self._writes.discard)
            await asyncio.shield(writing)

    def _write_one(self, trajectory: Trajectory) -> None:
        buffers, deadline = encode(trajectory), time.monotonic() + self.config.ring.full_seconds
        while not self._ended:
            try:
                self.ring.write(buffers, RING_POLL_SECONDS)
            except RingFull:
                if time.monotonic() > deadline:
                    raise
            else:
                self.written += 1
                return

    async def _refresh_weights(self) -> None:
        offered = self.control.value("weights/offer", -1)
        if isinstance(offered, int) and offered > self.taken_version:
            paused = await self.engine.receive_weights(offered)
            self.taken_version = offered
            log.info("version %d in place, engine paused for %.3f s", offered, paused)
            self.control.put(f"weights/taken/{self.name}", offered)

    def _raise_failed(self) -> None:
        for task in [t for t in self._groups if t.done()]:
            self._groups.remove(task)
            task.result()
