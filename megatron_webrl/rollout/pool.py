"""The rollout worker: one engine, its agents and browsers. It pulls tickets when it has room.

Agents outlive iterations: in mode `async` a group goes on while the engine takes new weights; in the other modes the
trainer offers weights only when no group is wanted any more. docs/rollout.md tells the whole story.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_webrl.config import Config
from megatron_webrl.control import POLL_SECONDS, Control, Start, Stopped, start_at
from megatron_webrl.ring.errors import RingFull
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.engine import Engine
from megatron_webrl.rollout.episodes import Episodes
from megatron_webrl.rollout.evaluation import Evaluator
from megatron_webrl.rollout.group import GroupRun
from megatron_webrl.rollout.occupancy import Occupancy
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
    evaluator: Evaluator
    name: str  # of this life of the worker
    starts: Sequence[Start] = ()  # of the job, in their order
    written: int = 0
    _finished: int = 0  # of groups that are done with
    _left: list[int] = field(default_factory=list)  # positions that an earlier life did not close
    _groups: dict[asyncio.Task[None], GroupRun] = field(default_factory=dict)
    _writes: set[asyncio.Task[None]] = field(default_factory=set)
    _occupancy: Occupancy = field(default_factory=Occupancy)
    _newest: int = -1  # version that the trainer has offered
    _ended: bool = False

    @property
    def finished(self) -> int:
        """Episodes that came to an end in this life, whatever end."""
        return self._finished + sum(group.finished for group in self._groups.values())

    async def run(self) -> None:
        """Work until the job has ended; then leave unfinished episodes and report the account."""
        try:
            while True:
                self.control.check(("trainer-0",), self.config.trainer_patience)
                self._raise_failed()
                fresh = await self._take_weights()
                self._newest = self.refresh.newest()
                self._abandon_old()
                self.evaluator.step()
                await self._make_way()
                if fresh and not self._waits and not self.evaluator.alone:
                    self._fill()
                self._report()
                await asyncio.sleep(POLL_SECONDS)
        except Stopped:
            pass
        finally:
            self._ended = True
            for task in self._groups:
                task.cancel()
            await asyncio.gather(self.evaluator.close(), *self._groups, *self._writes, return_exceptions=True)
        # Finished episodes of unfinished groups never reach the ring: the trainer counts them as waiting.
        final = {"life": self.name, "finished": self.finished, "held": self.finished - self.written}
        self.control.put(f"final/{self.control.role}", final)

    def _report(self) -> None:
        self.control.report(self._status())
        self.control.put(f"occupancy/{self.control.role}", {"life": self.name} | self._occupancy.sums())

    def _status(self) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        waits = ", waiting for weights anew" if self._waits else ""
        groups = f"{len(self._groups)} groups running, {self.finished} episodes done"
        return f"version {self.engine.version}{waits}: {groups}{self.evaluator.status()}"

    async def _make_way(self) -> None:
        """Leave the groups in flight to an evaluation that runs alone: after the last update nobody trains on them."""
        if self.evaluator.alone and self._groups:
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)
            self._finished += sum(group.finished for group in self._groups.values())
            self._groups.clear()

    async def _take_weights(self) -> bool:
        """Bring the engine up to date, in modes with fixed weights never with a group in flight; False: not yet done.

        There the trainer offers weights once it has its batch: a group that still runs is one that it has already,
        run again after a worker's death, or one that it does not want of an engine that missed its weights.
        """
        if self.config.rollout.mode != "async" and self.refresh.offered():
            running = [group for group in self._groups.values() if group.generating]
            for group in running:
                self._abandon(group, "weights are offered: the batch is whole without it")
            if running:
                return False
        await self.refresh.step()
        return True

    @property
    def _waits(self) -> bool:
        """Whether what the engine would make could not be trained: it has no whole weights, or too old ones.

        Those of a trainer that died are numbered as others are that the trainer which is there makes.
        """
        broken = self.engine.version < 0 or self.engine.torn
        return broken or self.refresh.outlived or self._too_old(self.engine.version)

    def _too_old(self, version: int) -> bool:
        return self._newest - version > self.config.staleness

    def _abandon_old(self) -> None:
        """End groups that cannot be trained any more: their oldest token is too old already."""
        for group in self._groups.values():
            if group.generating and group.oldest is not None and self._too_old(group.oldest):
                self._abandon(group, f"its oldest token is of version {group.oldest}, the trainer at {self._newest}")

    def _abandon(self, group: GroupRun, why: str) -> None:
        if not group.abandoned:
            log.info("ticket %d is abandoned: %s", group.ticket, why)
            group.abandon()

    def _fill(self) -> None:
        """Take tickets while there is room: at most this worker's share of those that are free, to leave some to
        other workers; who is fast has room again sooner, and takes more.
        """
        if not self.starts and (starts := self.control.starts()):
            self.starts, self._left = starts, self.control.left_positions(starts[0].first)
            if self._left:
                log.info("taking up %d groups that an earlier life of this worker had not finished", len(self._left))
        if not self.starts:
            return
        share = -(-self.control.free_positions() // self.config.rollout.engines)
        while len(self._groups) < self.config.rollout.groups_in_flight and (self._left or share > 0):
            if self._left:
                position: int | None = self._left.pop(0)
            else:
                position, share = self.control.take_position(), share - 1
            if position is None:
                return
            self._begin(position)

    def _begin(self, position: int) -> None:
        if self.control.opened() > len(self.starts):  # what the position stands for was published before
            self.starts = self.control.starts()
        ticket = start_at(self.starts, position).ticket(position)
        group = GroupRun(
            self.episodes, self.engine, ticket, self.starts[-1].incarnation, self.config.rollout, self._occupancy
        )
        self._groups[asyncio.create_task(self._run_group(position, group))] = group

    async def _run_group(self, position: int, group: GroupRun) -> None:
        await self._write([replace(each, worker=self.name) for each in await group.run()])
        self.control.close_position(position)

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
            self._finished += self._groups.pop(task).finished
            task.result()
