"""The everlasting pool: claims tickets when it has room, runs groups, writes trajectories.

In mode `async` groups continue through updates; otherwise weights are offered between batches (docs/rollout.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.control.state import TICKETS
from megatron_webrl.judge.budget import BudgetSpent, request_stop_without_budget
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import Evaluator
from megatron_webrl.rollout.generator import NO_LIMITS, Generation, ResponseLimits
from megatron_webrl.rollout.group import EngineLoad, GroupRun, TicketClaims
from megatron_webrl.rollout.ring_output import TrajectoryWriter
from megatron_webrl.tasks.files.table import task_file_digests
from megatron_webrl.track.episodes import TRAINING, EpisodeStore
from megatron_webrl.track.live_rollouts import RunningEpisodes
from megatron_webrl.track.process_memory import PeakMemory
from megatron_webrl.track.timeline import Track

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 900.0  # limit of one write into a full ring, beyond the time that the trainer may wait for a save


@dataclass
class RolloutPool:
    """Runs groups until the job ends, and counts every finished episode."""

    config: Config
    control: ControlClient
    ring: Ring
    engine: VLLMEngine
    episode_runner: EpisodeRunner
    weight_client: WeightClient
    store: EpisodeStore
    instance_id: str  # <role>.<number>
    _finished: int = 0  # episodes of groups that have ended
    _groups: dict[asyncio.Task[None], GroupRun] = field(default_factory=dict)
    _load: EngineLoad = field(default_factory=EngineLoad)
    _memory: PeakMemory = field(default_factory=PeakMemory)
    _newest_version: int = -1  # that the trainer has offered
    _budget_spent: bool = False  # of the judge

    def __post_init__(self) -> None:
        self.claims = TicketClaims(self.control, self.config.rollout.engines, task_file_digests(self.config.tasks))
        save_seconds = self.config.checkpoint_timeout_seconds  # for which the trainer may wait
        self.writer = TrajectoryWriter(self.ring, TIMEOUT_SECONDS + save_seconds)
        self.evaluator = Evaluator(
            self.config, self.control, self.engine, self.episode_runner, self.store, self.instance_id
        )
        self.waiting = Track(self.episode_runner.timeline, "worker")
        self.running_episodes = RunningEpisodes(self.config, self.control, self.episode_runner.live)

    async def run(self) -> None:
        """Run groups until the job ends; then cancel unfinished groups and report the final counts."""
        measuring = asyncio.create_task(self._memory.measure_repeatedly())
        try:
            while True:
                self.control.check_job(("trainer-0",), self.config.trainer_grace_seconds)
                self._remove_finished_groups()
                has_polled = await self._poll_weights()
                self._abort_old_groups()
                self.evaluator.poll()
                if self.evaluator.exclusive:
                    await self._cancel_groups_for_evaluation()
                if has_polled and not (self.evaluator.exclusive or self._needs_weights or self._budget_spent):
                    self._claim_tickets()
                else:
                    self.claims.put_back()
                self._report()
                await asyncio.sleep(POLL_SECONDS)
        except JobEnded:
            pass
        finally:
            measuring.cancel()
            await self._close()
        # Finished episodes of unfinished groups never reach the ring: the trainer counts them as waiting.
        unwritten = self.finished_episodes - self.writer.written_episodes
        counts = {"instance_id": self.instance_id, "finished": self.finished_episodes, "unwritten": unwritten}
        self.control.put_json(f"final_counts/{self.control.role}", counts)

    @property
    def finished_episodes(self) -> int:
        """Episodes that this instance has finished, masked ones included."""
        return self._finished + sum(group.finished_episodes for group in self._groups.values())

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes],
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        """Respond with the engine, and count the request. Implements Generator."""
        with self._load.track("requests"):
            return await self.engine.generate(session, token_ids, images, limits=limits)

    def _claim_tickets(self) -> None:
        for claim in self.claims.claim(self._room):
            group = GroupRun(self.episode_runner, self, claim, self._load)
            self._groups[asyncio.create_task(self._run_group(group))] = group

    @property
    def _acting_groups(self) -> int:
        """Groups that do not only wait for verdicts; judging uses no engine or browser."""
        return sum(group.is_acting for group in self._groups.values())

    @property
    def _room(self) -> int:
        """Groups that may start."""
        return self.config.rollout.groups_in_flight - self._acting_groups

    async def _run_group(self, group: GroupRun) -> None:
        track = Track(self.episode_runner.timeline, f"ticket {group.ticket}")
        try:
            with track.span("ticket", ticket=group.ticket, epoch=group.claim.restart_epoch):
                trajectories = [replace(each, worker=self.instance_id) for each in await group.run()]
                with track.span("write to ring"):
                    await self.writer.write(trajectories)
        finally:
            self.episode_runner.live.close(TRAINING, group.ticket)
        # In a thread: an outage of the control service delays no other group.
        await asyncio.to_thread(self.control.close_ticket, group.ticket)
        await asyncio.to_thread(self.store.add, trajectories)

    def _remove_finished_groups(self) -> None:
        for task in [task for task in self._groups if task.done()]:
            self._finished += self._groups.pop(task).finished_episodes
            try:
                task.result()  # raises the error of a failed group
            except BudgetSpent as error:  # its ticket stays open: a resumed job runs it again
                if not self._budget_spent:
                    request_stop_without_budget(self.control, error)
                self._budget_spent = True

    async def _poll_weights(self) -> bool:
        """Take offered weights; with fixed weights only once no group is in flight. False if groups are in flight.

        The batch needs no group that still runs: it repeats a dead worker's, or its engine missed an update.
        """
        running = [group for group in self._groups.values() if group.has_running_episodes]
        if self.config.rollout.mode != "async" and self.weight_client.has_offer() and running:
            for group in running:
                self._abort(group, "weights are offered, so the batch is complete without it")
            return False
        await self.weight_client.poll()
        return True

    @property
    def _needs_weights(self) -> bool:
        """Whether new groups could not be trained: weights incomplete, too old, or of a dead trainer at any version."""
        incomplete = self.engine.version < 0 or self.engine.partially_updated
        return incomplete or self.weight_client.from_old_trainer or self._is_too_old(self.engine.version)

    def _is_too_old(self, version: int) -> bool:
        return self._newest_version - version > self.config.staleness_limit

    def _abort_old_groups(self) -> None:
        self._newest_version = self.weight_client.newest_version()
        if self.config.rollout.stale == "mask":
            return  # its new tokens are not old
        for group in self._groups.values():
            oldest = group.oldest_version
            if group.has_running_episodes and oldest is not None and self._is_too_old(oldest):
                self._abort(group, f"its oldest token is of version {oldest}, the trainer at {self._newest_version}")

    def _abort(self, group: GroupRun, reason: str) -> None:
        if not group.aborted:
            log.info("aborting ticket %d: %s", group.ticket, reason)
            group.abort()

    async def _cancel_groups_for_evaluation(self) -> None:
        """Cancel in-flight groups before an exclusive evaluation: after the last update they are not trained.

        They can be claimed again: a trainer that resumes from an earlier checkpoint needs their tickets.
        """
        for task in self._groups:
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        tickets = [group.ticket for task, group in self._groups.items() if task.cancelled()]
        if tickets:
            await asyncio.to_thread(self.control.run, "give_back", TICKETS, self.control.role, tickets)
        self._finished = self.finished_episodes
        self._groups.clear()

    def _report(self) -> None:
        waits_for_tickets = self._room > 0 and not self.evaluator.exclusive
        waits_for = "weights" if self._needs_weights else "tickets" if waits_for_tickets else ""
        self.waiting.switch(waits_for and f"wait for {waits_for}")
        self.control.report_status(self._status())
        self.running_episodes.poll()
        memory = {"gib": self._memory.gib, "peak_gib": self._memory.peak_gib}
        self.control.report_load({"instance_id": self.instance_id} | self._load.totals() | memory)

    def _status(self) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        waiting = ", waiting for new weights" if self._needs_weights else ""
        acting = self._acting_groups
        judged = f" and {len(self._groups) - acting} waiting for verdicts" if acting < len(self._groups) else ""
        groups = f"{acting} groups running{judged}, {self.finished_episodes} episodes done"
        return f"version {self.engine.version}{waiting}: {groups}{self.evaluator.status()}"

    async def _close(self) -> None:
        self.waiting.switch("")
        writes = self.writer.close()
        for task in self._groups:
            task.cancel()
        await asyncio.gather(self.evaluator.close(), *self._groups, *writes, return_exceptions=True)
        await self.running_episodes.close()
