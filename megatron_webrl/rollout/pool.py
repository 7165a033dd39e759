"""The everlasting pool: claims tickets, runs groups, writes trajectories.

The loop of a rollout worker: one engine, its agents and browsers. It claims tickets when it has room.

In mode `async` groups continue through updates; otherwise weights are offered between batches (docs/rollout.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.control.claimer import Claimer
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.control.state import TICKETS
from megatron_webrl.control.tickets import TicketClaim
from megatron_webrl.judge.budget import BudgetSpent, request_stop_without_budget
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import NodeRing, Ring
from megatron_webrl.ring.segment import RingFull, segment_prefix, sweep_segments
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import EngineLoad, TimeWeightedGauge, WeightClient
from megatron_webrl.rollout.episode_runner import Deadline, EpisodeRunner, run_with_retries
from megatron_webrl.rollout.evaluator import Evaluator
from megatron_webrl.rollout.generator import Generation, Generator
from megatron_webrl.tasks.files.table import TASK_FILES, FileDigest, difference_between_nodes, task_file_digests
from megatron_webrl.track.episodes import TRAINING, EpisodeStore
from megatron_webrl.track.live_rollouts import RunningEpisodes
from megatron_webrl.track.process_memory import PeakMemory
from megatron_webrl.track.timeline import Track
from megatron_webrl.types import ABORTED, Trajectory

log = logging.getLogger(__name__)


@contextmanager
def open_node_ring(config: Config, control: ControlClient, node_ring: NodeRing, first_instance: bool) -> Iterator[Ring]:
    """Create or attach the node's ring, and unlink it if the job ends.

    The first instance removes rings of earlier jobs. If only this role ends, the trainer still reads its records.
    """
    if first_instance and (removed := sweep_segments(segment_prefix(config.run.name))):
        log.info("removed rings of an earlier job: %s", ", ".join(removed))
    with node_ring.create_or_attach(config.ring.capacity_mib * 2**20) as ring:
        clean = True
        try:
            yield ring
        except BaseException as error:
            clean = isinstance(error, JobEnded)
            raise
        finally:
            if _has_ended(control, clean):
                ring.unlink()


def _has_ended(control: ControlClient, clean: bool) -> bool:
    """Whether the job has ended, not only this role. Without an answer of the service, if the role was clean."""
    try:
        return control.job_end() is not None
    except JobFailed:
        return clean


TIMEOUT_SECONDS = 900.0  # limit of one write into a full ring, beyond the time that the trainer may wait for a save
RING_POLL_SECONDS = 1.0
MAX_WRITES = 32  # at once; more wait


class TrajectoryWriter:
    """Writes in threads, so that the event loop stays free; a full ring blocks only the group that writes."""

    def __init__(self, ring: Ring, timeout_seconds: float) -> None:
        self.written_episodes = 0
        self._ring, self._timeout_seconds = ring, timeout_seconds
        self._writes: set[asyncio.Future[None]] = set()
        # Not the event loop's own threads, which engine, judge and control client need while the ring is full.
        self._threads = ThreadPoolExecutor(MAX_WRITES, "write to the ring")
        self._closed = False

    async def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write them in order; cancelling does not interrupt the current write. Raises RingFull."""
        for trajectory in trajectories:
            writing = asyncio.get_running_loop().run_in_executor(self._threads, self._write_one, trajectory)
            self._writes.add(writing)
            writing.add_done_callback(self._writes.discard)
            await asyncio.shield(writing)

    def close(self) -> list[asyncio.Future[None]]:
        """Stop waiting for space; returns the writes in progress."""
        self._closed = True
        return list(self._writes)

    def _write_one(self, trajectory: Trajectory) -> None:
        buffers, deadline = encode_trajectory(trajectory), time.monotonic() + self._timeout_seconds
        while not self._closed:
            try:
                self._ring.write(buffers, RING_POLL_SECONDS)
            except RingFull:
                if time.monotonic() > deadline:
                    raise
            else:
                self.written_episodes += 1
                return


class TicketClaims:
    """A worker's access to the tickets. They are available once the trainer has started an epoch."""

    def __init__(self, control: ControlClient, engines: int, files: Mapping[str, FileDigest] | None = None) -> None:
        """`engines` share the free tickets: a fast worker has room again sooner, and claims more. `files`: the task
        files of the worker by setting, which must be the trainer's.
        """
        self._control, self._files = control, files or {}
        self._claimer = Claimer(control, TICKETS, control.role, engines)
        self._unfinished: list[TicketClaim] | None = None  # that an earlier instance claimed and did not close

    def claim(self, count: int) -> list[TicketClaim]:
        """Up to `count` tickets that are at hand; more are claimed in the background. Never waits.

        Ends the job and raises JobFailed if a task file has other rows than the trainer's.
        """
        if self._unfinished is None:
            if not self._control.ticket_epoch_count():
                return []
            self._check_files()
            self._unfinished = self._control.unfinished_claims()
            if self._unfinished:
                log.info("resuming %d groups that an earlier instance left unfinished", len(self._unfinished))
        claims, self._unfinished = self._unfinished[: max(0, count)], self._unfinished[max(0, count) :]
        return [*claims, *map(TicketClaim.from_json, self._claimer.poll(count - len(claims)))]

    def put_back(self) -> None:
        """While no group can start: let other workers have the tickets that were claimed in the background."""
        self._claimer.put_back()

    def _check_files(self) -> None:
        trainers = self._control.get_json(TASK_FILES, {})
        if difference := difference_between_nodes(trainers, self._files, self._control.role):
            self._control.end_job(f"failed: {difference}")  # a restarted worker would have the same file
            raise JobFailed(difference)


class SupportsRunEpisode(Protocol):
    """Runs one try at an episode, as EpisodeRunner does."""

    async def run_episode(
        self, generator: Generator, claim: TicketClaim, index: int, deadline: Deadline | None = None,
        on_acted: Callable[[], None] = lambda: None,
    ) -> Trajectory:  # fmt: skip
        """The try's trajectory; a fault masks it and does not raise. Calls `on_acted` when only its verdict is left."""
        ...


class _Try:
    """One try at an episode: its deadline and its oldest policy version. Implements Generator."""

    def __init__(self, generator: Generator, seconds: float, requests: TimeWeightedGauge) -> None:
        self.deadline = Deadline(seconds)
        self.oldest_version: int | None = None
        self._generator, self._requests = generator, requests

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        with self._requests.track():
            generation = await self._generator.generate(session, token_ids, images)
        new = generation.versions.tolist()
        self.oldest_version = min(new if self.oldest_version is None else [self.oldest_version, *new], default=None)
        return generation


class GroupRun:
    """The episodes of one ticket. Those with a retryable outcome are tried again, up to rollout.retries times.

    A replaced try is not an episode; the last try's trajectory counts it (Trajectory.tries, discarded_tokens).
    """

    def __init__(
        self,
        runner: SupportsRunEpisode,
        generator: Generator,
        claim: TicketClaim,
        settings: RolloutConfig,
        load: EngineLoad,
    ) -> None:
        self.claim, self.ticket, self.restart_epoch = claim, claim.ticket, claim.restart_epoch
        self.aborted, self.finished_episodes = False, 0
        self._finished_acting: set[int] = set()  # indices of episodes that need neither engine nor browser any more
        self._runner, self._generator = runner, generator
        self._settings, self._load = settings, load
        self._tries: dict[int, _Try] = {}  # by episode index: running tries, and finished trainable ones

    @property
    def has_running_episodes(self) -> bool:
        return self.finished_episodes < self._settings.group_size

    @property
    def is_acting(self) -> bool:
        """Whether an episode still uses the engine and a browser, or will; otherwise only verdicts are missing."""
        return len(self._finished_acting) < self._settings.group_size

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the responses of running and trainable episodes; None: no response."""
        return min((one.oldest_version for one in self._tries.values() if one.oldest_version is not None), default=None)

    async def run(self) -> list[Trajectory]:
        """Run all episodes; their trajectories by index. Raises errors that are not faults of a single episode."""
        try:
            async with asyncio.TaskGroup() as tasks:
                indices = range(self._settings.group_size)
                running = [tasks.create_task(self._episode(index)) for index in indices]
        except ExceptionGroup as group:  # the first error cancelled the other episodes
            raise group.exceptions[0] from None
        return [task.result() for task in running]

    def abort(self) -> None:
        """End running episodes, masked as ABORTED, with their steps so far."""
        self.aborted = True
        for each in self._tries.values():
            each.deadline.expire(ABORTED)

    def _stop_acting(self, index: int, acting: ExitStack) -> None:
        acting.close()
        self._finished_acting.add(index)

    async def _episode(self, index: int) -> Trajectory:
        trajectory = await run_with_retries(
            partial(self._run_try, index), self._settings.retries, f"episode {index} of ticket {self.ticket}"
        )
        if not trajectory.trainable:
            del self._tries[index]
        self._finished_acting.add(index)
        self.finished_episodes += 1
        return trajectory

    async def _run_try(self, index: int) -> Trajectory:
        run = _Try(self._generator, self._settings.episode_timeout_seconds, self._load.requests)
        self._tries[index] = run
        self._finished_acting.discard(index)
        if self.aborted:
            run.deadline.expire(ABORTED)
        with ExitStack() as acting:  # left early while the episode waits for its verdict
            acting.enter_context(self._load.episodes.track())
            return await self._runner.run_episode(
                run, self.claim, index, run.deadline, partial(self._stop_acting, index, acting)
            )


@dataclass
class RolloutPool:
    """Runs groups until the job ends, and counts every finished episode."""

    config: Config
    control: ControlClient
    ring: Ring
    engine: VLLMEngine
    episode_runner: EpisodeRunner
    weight_client: WeightClient
    evaluator: Evaluator
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
        save_seconds = self.config.trainer.checkpoint.timeout_seconds  # for which the trainer may wait
        self.writer = TrajectoryWriter(self.ring, TIMEOUT_SECONDS + save_seconds)
        self.waiting = Track(self.episode_runner.timeline, "worker")
        self.running_episodes = RunningEpisodes(self.config, self.control, self.episode_runner.live)

    async def run(self) -> None:
        """Run groups until the job ends; then cancel unfinished groups and report the final counts."""
        measuring = asyncio.create_task(self._memory.measure_repeatedly())
        try:
            while True:
                self.control.check_job(("trainer-0",), self.config.trainer_grace_seconds)
                self._remove_finished_groups()
                polled = await self._poll_weights()
                self._newest_version = self.weight_client.newest_version()
                self._abort_old_groups()
                self.evaluator.poll()
                if self.evaluator.exclusive:
                    await self._cancel_groups_for_evaluation()
                if self.evaluator.exclusive or not polled or self._needs_weights or self._budget_spent:
                    self.claims.put_back()
                else:
                    self._claim_tickets()
                self.waiting.switch(self._waits_for())
                self._report()
                await asyncio.sleep(POLL_SECONDS)
        except JobEnded:
            pass
        finally:
            measuring.cancel()
            self.waiting.switch("")
            writes = self.writer.close()
            for task in self._groups:
                task.cancel()
            await asyncio.gather(self.evaluator.close(), *self._groups, *writes, return_exceptions=True)
            await self.running_episodes.close()
        self._report_final_counts()

    @property
    def finished_episodes(self) -> int:
        """Episodes that this instance has finished, masked ones included."""
        return self._finished + sum(group.finished_episodes for group in self._groups.values())

    def _claim_tickets(self) -> None:
        for claim in self.claims.claim(self._room):
            group = GroupRun(self.episode_runner, self.engine, claim, self.config.rollout, self._load)
            self._groups[asyncio.create_task(self._run_group(group))] = group

    @property
    def _room(self) -> int:
        """Groups that may start. Those that only wait for verdicts take no room: judging uses no engine or browser."""
        return self.config.rollout.groups_in_flight - sum(group.is_acting for group in self._groups.values())

    def _waits_for(self) -> str:
        if self._needs_weights:
            return "wait for weights"
        return "wait for tickets" if self._room > 0 and not self.evaluator.exclusive else ""

    async def _run_group(self, group: GroupRun) -> None:
        track = Track(self.episode_runner.timeline, f"ticket {group.ticket}")
        try:
            with track.span("ticket", ticket=group.ticket, epoch=group.restart_epoch):
                trajectories = [replace(each, worker=self.instance_id) for each in await group.run()]
                with track.span("write to ring"):
                    await self.writer.write(trajectories)
        finally:
            self.episode_runner.live.close(TRAINING, group.ticket)
        await asyncio.to_thread(
            self.control.close_ticket, group.ticket
        )  # an outage of the control service delays no other group
        await asyncio.to_thread(self.store.add, trajectories)

    def _remove_finished_groups(self) -> None:
        for task in [task for task in self._groups if task.done()]:
            self._finished += self._groups.pop(task).finished_episodes
            try:
                task.result()  # raises the error of a failed group
            except BudgetSpent as error:  # its ticket stays open: a resumed job runs it again
                self._end_job_without_budget(error)

    def _end_job_without_budget(self, error: BudgetSpent) -> None:
        if not self._budget_spent:
            request_stop_without_budget(self.control, error)
        self._budget_spent = True

    async def _poll_weights(self) -> bool:
        """Take offered weights; with fixed weights only once no group is in flight. False if groups are in flight.

        The batch needs no group that still runs: it repeats a dead worker's, or its engine missed an update.
        """
        if self.config.rollout.mode != "async" and self.weight_client.has_offer():
            running = [group for group in self._groups.values() if group.has_running_episodes]
            for group in running:
                self._abort(group, "weights are offered, so the batch is complete without it")
            if running:
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
        self._finished += sum(group.finished_episodes for group in self._groups.values())
        self._groups.clear()

    def _report(self) -> None:
        self.control.report_status(self._status())
        self.running_episodes.poll()
        memory = {"gib": self._memory.gib, "peak_gib": self._memory.peak_gib}
        self.control.report_load({"instance_id": self.instance_id} | self._load.totals() | memory)

    def _status(self) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        waiting = ", waiting for new weights" if self._needs_weights else ""
        acting = sum(group.is_acting for group in self._groups.values())
        judged = f" and {len(self._groups) - acting} waiting for verdicts" if acting < len(self._groups) else ""
        groups = f"{acting} groups running{judged}, {self.finished_episodes} episodes done"
        return f"version {self.engine.version}{waiting}: {groups}{self.evaluator.status()}"

    def _report_final_counts(self) -> None:
        # Finished episodes of unfinished groups never reach the ring: the trainer counts them as waiting.
        unwritten = self.finished_episodes - self.writer.written_episodes
        counts = {"instance_id": self.instance_id, "finished": self.finished_episodes, "unwritten": unwritten}
        self.control.put_json(f"final_counts/{self.control.role}", counts)
