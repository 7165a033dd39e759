"""Groups: the tickets that a worker claims, the episodes of one, and the load that they put on the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from megatron_webrl.control.client import Claimer, ControlClient, TicketClaim
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.control.state import TICKETS
from megatron_webrl.rollout.agent import Episode
from megatron_webrl.rollout.episode_runner import EpisodeRunner, run_with_retries
from megatron_webrl.rollout.generator import Generator
from megatron_webrl.tasks.files.table import TASK_FILES, FileDigest, difference_between_nodes
from megatron_webrl.types import ABORTED, FAULT_OUTCOMES, LIMIT_OUTCOMES, Trajectory
from megatron_webrl.util.concurrency import run_together

log = logging.getLogger(__name__)


class EngineLoad:
    """Requests in an engine, and running episodes. An episode without a request uses its browser, or waits."""

    def __init__(self) -> None:
        self.counts = {"requests": 0, "episodes": 0}
        self._totals = {"seconds": 0.0, "busy": 0.0, "requests": 0.0, "episodes": 0.0}
        self._since = time.monotonic()

    @contextmanager
    def track(self, what: str) -> Iterator[None]:
        """Count one of the "requests" or "episodes" in this context."""
        self.totals()
        self.counts[what] += 1
        try:
            yield
        finally:
            self.totals()
            self.counts[what] -= 1

    def totals(self) -> dict[str, float]:
        """Seconds since the start, seconds with a request in the engine, request-seconds and episode-seconds."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        levels = {"seconds": 1, "busy": self.counts["requests"] > 0, **self.counts}
        self._totals = {name: total + passed * levels[name] for name, total in self._totals.items()}
        return self._totals


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


class GroupRun:
    """The episodes of one ticket. Those with a retryable outcome are tried again.

    A replaced try is not an episode; the last try's trajectory counts it (Trajectory.tries, discarded_tokens).
    """

    def __init__(self, runner: EpisodeRunner, generator: Generator, claim: TicketClaim, load: EngineLoad) -> None:
        self.claim, self.ticket = claim, claim.ticket
        self.aborted, self.finished_episodes = False, 0
        self._runner, self._generator, self._load = runner, generator, load
        self._settings = runner.config.rollout
        failing = {"limits_fail": LIMIT_OUTCOMES, "all_fail": LIMIT_OUTCOMES | FAULT_OUTCOMES}
        self._failing = failing.get(runner.config.trainer.reward.unfinished, frozenset())  # outcomes that are failures
        self._acting = set(range(self._settings.group_size))  # indices of episodes that need engine and browser
        self._tries: dict[int, Episode] = {}  # by index: running tries, and finished trainable ones

    @property
    def has_running_episodes(self) -> bool:
        return self.finished_episodes < self._settings.group_size

    @property
    def is_acting(self) -> bool:
        """Whether an episode still uses the engine and a browser, or will; otherwise only verdicts are missing."""
        return bool(self._acting)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the responses of running and trainable episodes; None: no response."""
        return min((one.oldest_version for one in self._tries.values() if one.oldest_version is not None), default=None)

    async def run(self) -> list[Trajectory]:
        """Run all episodes; their trajectories by index. Raises errors that are not faults of a single episode."""
        return await run_together(map(self._episode, range(self._settings.group_size)))

    def abort(self) -> None:
        """End running episodes, masked as ABORTED, with their steps so far."""
        self.aborted = True
        for each in self._tries.values():
            each.deadline.expire(ABORTED)

    async def _episode(self, index: int) -> Trajectory:
        name = f"episode {index} of ticket {self.ticket}"
        trajectory = await run_with_retries(lambda: self._run_try(index), name)
        if trajectory.outcome in self._failing:
            trajectory = replace(trajectory, outcome="failure")  # its end_reason names the fault
        if not trajectory.trainable:
            del self._tries[index]
        self.finished_episodes += 1
        return trajectory

    async def _run_try(self, index: int) -> Trajectory:
        episode = self._tries[index] = self._runner.new_try(self.claim, index)
        self._acting.add(index)
        if self.aborted:
            episode.deadline.expire(ABORTED)
        with ExitStack() as acting:  # left early while the episode waits for its verdict
            acting.enter_context(self._load.track("episodes"))
            acting.callback(self._acting.discard, index)
            return await self._runner.run_try(self._generator, episode, acting.close)
