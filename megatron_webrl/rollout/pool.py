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

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import POLL_SECONDS, ControlClient, JobEnded, TicketEpoch, ticket_epoch_at
from megatron_webrl.ring.errors import RingFull
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.engine.engine_load import EngineLoad
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import Evaluator
from megatron_webrl.rollout.group_run import GroupRun
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

RING_POLL_SECONDS = 1.0


@dataclass
class RolloutPool:
    """Runs groups until the job ends; counts every finished episode."""

    config: Config
    control: ControlClient
    ring: Ring
    engine: VLLMEngine
    episode_runner: EpisodeRunner
    weight_client: WeightClient
    evaluator: Evaluator
    instance_id: str  # of this life of the worker
    ticket_epochs: Sequence[TicketEpoch] = ()  # of the job, in their order
    written_episodes: int = 0
    _finished: int = 0  # of groups that are done with
    _left: list[int] = field(default_factory=list)  # positions that an earlier life did not close
    _groups: dict[asyncio.Task[None], GroupRun] = field(default_factory=dict)
    _writes: set[asyncio.Task[None]] = field(default_factory=set)
    _occupancy: EngineLoad = field(default_factory=EngineLoad)
    _newest: int = -1  # version that the trainer has offered
    _ended: bool = False

    @property
    def finished_episodes(self) -> int:
        """Episodes that came to an end in this life, whatever end."""
        return self._finished + sum(group.finished_episodes for group in self._groups.values())

    async def run(self) -> None:
        """Work until the job has ended; then leave unfinished episodes and report the account."""
        try:
            while True:
                self.control.check_job(("trainer-0",), self.config.trainer_grace_seconds)
                self._raise_failed()
                fresh = await self._take_weights()
                self._newest = self.weight_client.newest_version()
                self._abandon_old()
                self.evaluator.poll()
                await self._make_way()
                if fresh and not self._waits and not self.evaluator.exclusive:
                    self._fill()
                self._report()
                await asyncio.sleep(POLL_SECONDS)
        except JobEnded:
            pass
        finally:
            self._ended = True
            for task in self._groups:
                task.cancel()
            await asyncio.gather(self.evaluator.close(), *self._groups, *self._writes, return_exceptions=True)
        # Finished episodes of unfinished groups never reach the ring: the trainer counts them as waiting.
        final = {
            "instance_id": self.instance_id,
            "finished": self.finished_episodes,
            "unwritten": self.finished_episodes - self.written_episodes,
        }
        self.control.put_json(f"final_counts/{self.control.role}", final)

    def _report(self) -> None:
        self.control.report_status(self._status())
        self.control.put_json(
            f"engine_load/{self.control.role}", {"instance_id": self.instance_id} | self._occupancy.totals()
        )

    def _status(self) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        waits = ", waiting for weights anew" if self._waits else ""
        groups = f"{len(self._groups)} groups running, {self.finished_episodes} episodes done"
        return f"version {self.engine.version}{waits}: {groups}{self.evaluator.status()}"

    async def _make_way(self) -> None:
        """Leave the groups in flight to an evaluation that runs alone: after the last update nobody trains on them."""
        if self.evaluator.exclusive and self._groups:
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)
            self._finished += sum(group.finished_episodes for group in self._groups.values())
            self._groups.clear()

    async def _take_weights(self) -> bool:
        """Bring the engine up to date, in modes with fixed weights never with a group in flight; False: not yet done.

        There the trainer offers weights once it has its batch: a group that still runs is one that it has already,
        run again after a worker's death, or one that it does not want of an engine that missed its weights.
        """
        if self.config.rollout.mode != "async" and self.weight_client.has_offer():
            running = [group for group in self._groups.values() if group.has_running_episodes]
            for group in running:
                self._abandon(group, "weights are offered: the batch is whole without it")
            if running:
                return False
        await self.weight_client.poll()
        return True

    @property
    def _waits(self) -> bool:
        """Whether what the engine would make could not be trained: it has no whole weights, or too old ones.

        Those of a trainer that died are numbered as others are that the trainer which is there makes.
        """
        broken = self.engine.version < 0 or self.engine.partially_updated
        return broken or self.weight_client.from_old_trainer or self._too_old(self.engine.version)

    def _too_old(self, version: int) -> bool:
        return self._newest - version > self.config.staleness_limit

    def _abandon_old(self) -> None:
        """End groups that cannot be trained any more: their oldest token is too old already."""
        for group in self._groups.values():
            if group.has_running_episodes and group.oldest_version is not None and self._too_old(group.oldest_version):
                self._abandon(
                    group, f"its oldest token is of version {group.oldest_version}, the trainer at {self._newest}"
                )

    def _abandon(self, group: GroupRun, why: str) -> None:
        if not group.aborted:
            log.info("ticket %d is abandoned: %s", group.ticket, why)
            group.abort()

    def _fill(self) -> None:
        """Take tickets while there is room: at most this worker's share of those that are free, to leave some to
        other workers; who is fast has room again sooner, and takes more.
        """
        if not self.ticket_epochs and (starts := self.control.ticket_epochs()):
            self.ticket_epochs, self._left = starts, self.control.unfinished_claims(starts[0].first_slot)
            if self._left:
                log.info("taking up %d groups that an earlier life of this worker had not finished", len(self._left))
        if not self.ticket_epochs:
            return
        share = -(-self.control.free_slots() // self.config.rollout.engines)
        while len(self._groups) < self.config.rollout.groups_in_flight and (self._left or share > 0):
            if self._left:
                position: int | None = self._left.pop(0)
            else:
                position, share = self.control.claim_slot(), share - 1
            if position is None:
                return
            self._begin(position)

    def _begin(self, position: int) -> None:
        if self.control.ticket_epoch_count() > len(
            self.ticket_epochs
        ):  # what the position stands for was published before
            self.ticket_epochs = self.control.ticket_epochs()
        ticket = ticket_epoch_at(self.ticket_epochs, position).ticket_at(position)
        group = GroupRun(
            self.episode_runner,
            self.engine,
            ticket,
            self.ticket_epochs[-1].restart_epoch,
            self.config.rollout,
            self._occupancy,
        )
        self._groups[asyncio.create_task(self._run_group(position, group))] = group

    async def _run_group(self, position: int, group: GroupRun) -> None:
        await self._write([replace(each, worker=self.instance_id) for each in await group.run()])
        self.control.close_slot(position)

    async def _write(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            # In a thread: a full ring holds back this group alone.
            writing = asyncio.create_task(asyncio.to_thread(self._write_one, trajectory))
            self._writes.add(writing)
            writing.add_done_callback(self._writes.discard)
            await asyncio.shield(writing)

    def _write_one(self, trajectory: Trajectory) -> None:
        buffers, deadline = encode_trajectory(trajectory), time.monotonic() + self.config.ring.write_timeout_seconds
        while not self._ended:
            try:
                self.ring.write(buffers, RING_POLL_SECONDS)
            except RingFull:
                if time.monotonic() > deadline:
                    raise
            else:
                self.written_episodes += 1
                return

    def _raise_failed(self) -> None:
        for task in [t for t in self._groups if t.done()]:
            self._finished += self._groups.pop(task).finished_episodes
            task.result()
