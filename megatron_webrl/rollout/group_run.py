"""A running group: its episodes, their retries, and aborting it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import numpy as np

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.control.tickets import TicketClaim
from megatron_webrl.rollout.deadline import Deadline
from megatron_webrl.rollout.engine.engine_load import EngineLoad, TimeWeightedGauge
from megatron_webrl.rollout.episode_runner import run_with_retries
from megatron_webrl.rollout.generator import Generation, Generator
from megatron_webrl.types import ABORTED, Trajectory


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
