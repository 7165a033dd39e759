"""The rollout worker: one engine, its agents and browsers. It pulls tickets when it has room.

Agents outlive iterations and weight updates: a group continues while the engine takes new weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_webrl.config import Config
from megatron_webrl.control import POLL_SECONDS, Control, Start, Stopped
from megatron_webrl.ring.errors import RingFull
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.engine import Engine
from megatron_webrl.rollout.episodes import Episodes
from megatron_webrl.rollout.refresh import Refresh
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
    refresh: Refresh
    name: str  # of this life of the worker
    start: Start | None = None
    finished: int = 0
    written: int = 0
    _left: list[int] = field(default_factory=list)  # positions that an earlier life did not close
    _groups: set[asyncio.Task[None]] = field(default_factory=set)
    _writes: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: bool = False

    async def run(self) -> None:
        """Work until the job has ended; then leave unfinished episodes and report the account."""
        try:
            while True:
                self.control.check(("trainer-0",))
                self._raise_failed()
                await self.refresh.step()
                self._fill()
                self.control.report(self._status())
                await asyncio.sleep(POLL_SECONDS)
        except Stopped:
            pass
        finally:
            self._ended = True
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, *self._writes, return_exceptions=True)
        # Finished episodes of unfinished groups never reach the ring: the trainer counts them as waiting.
        final = {"life": self.name, "finished": self.finished, "held": self.finished - self.written}
        self.control.put(f"final/{self.control.role}", final)

    def _status(self) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        torn = ", waiting for weights anew" if self.engine.torn else ""
        return f"version {self.engine.version}{torn}: {len(self._groups)} groups running, {self.finished} episodes done"

    def _fill(self) -> None:
        if self.engine.version < 0 or self.engine.torn:
            return
        if self.start is None and (start := self.control.job_start()) is not None:
            self.start, self._left = start, self.control.left_positions(start)
            if self._left:
                log.info("taking up %d groups that an earlier life of this worker had not finished", len(self._left))
        while self.start is not None and len(self._groups) < self.config.rollout.groups_in_flight:
            position = self._left.pop(0) if self._left else self.control.take_position()
            if position is None:
                return
            self._groups.add(asyncio.create_task(self._run_group(position, self.start)))

    async def _run_group(self, position: int, start: Start) -> None:
        ticket, size = start.ticket(position), self.config.rollout.group_size
        episodes = (self._run_episode(ticket, index, start.incarnation) for index in range(size))
        await self._write(await asyncio.gather(*episodes))
        self.control.close_position(position)

    async def _run_episode(self, ticket: int, index: int, incarnation: int) -> Trajectory:
        trajectory = await self.episodes.run(self.engine, ticket, index, incarnation)
        self.finished += 1
        return replace(trajectory, worker=self.name)

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

    def _raise_failed(self) -> None:
        for task in [t for t in self._groups if t.done()]:
            self._groups.remove(task)
            task.result()
