"""One group while it runs: its episodes, their tries, and its end before time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.farm.client import RemoteSession
from megatron_webrl.rollout.deadline import Deadline
from megatron_webrl.rollout.engine.engine_load import EngineLoad, TimeWeightedGauge
from megatron_webrl.rollout.generator import Generation, Generator
from megatron_webrl.types import ABORTED, Trajectory

log = logging.getLogger(__name__)

RETRYABLE_OUTCOMES = frozenset(
    {"browser_error", "browser_crashed", "browser_timeout", "page_crashed", "lease_lost", "engine_error"}
)
"""Failures of the machinery that another try may not meet. Others say something about the page or the policy."""


class SupportsRunEpisode(Protocol):
    """What runs one try at an episode: rollout.episodes.Episodes."""

    async def run_episode(
        self, responder: Generator, ticket: int, index: int, restart_epoch: int, deadline: Deadline | None = None
    ) -> Trajectory:
        """The try's trajectory; a failure masks it and does not raise."""
        ...


class _Try:
    """One try at an episode: the responder that its agent asks, its limit, and the oldest version it has used."""

    def __init__(self, responder: Generator, seconds: float, requests: TimeWeightedGauge) -> None:
        self.deadline = Deadline(seconds)
        self.oldest_version: int | None = None
        self._responder, self._requests = responder, requests

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        """What the responder says, noted."""
        with self._requests.track():
            generation = await self._responder.generate(session, token_ids, images)
        versions = generation.versions.tolist()
        self.oldest_version = min(
            versions if self.oldest_version is None else [self.oldest_version, *versions], default=None
        )
        return generation


class GroupRun:
    """The episodes of one ticket.

    An episode that the machinery failed is tried again, rollout.retries times; a try that is replaced is not an
    episode: it is counted by the trajectory that replaced it (Trajectory.tries, lost_tokens).
    """

    def __init__(
        self, episodes: SupportsRunEpisode, responder: Generator, ticket: int, restart_epoch: int, settings: RolloutConfig,
        occupancy: EngineLoad,
    ) -> None:  # fmt: skip
        self.ticket, self.aborted = ticket, False
        self._episodes, self._responder, self._incarnation = episodes, responder, restart_epoch
        self._settings, self._occupancy = settings, occupancy
        self._tries: dict[int, _Try] = {}  # by index; those under way and those that count
        self.finished_episodes = 0  # episodes

    @property
    def has_running_episodes(self) -> bool:
        """Whether an episode of the group is under way."""
        return self.finished_episodes < self._settings.group_size

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the responses of the group that count so far."""
        return min(
            (each.oldest_version for each in self._tries.values() if each.oldest_version is not None), default=None
        )

    async def run(self) -> list[Trajectory]:
        """All trajectories, in the order of their indices. Raises what is no failure of a single episode."""
        try:
            async with asyncio.TaskGroup() as tasks:
                indices = range(self._settings.group_size)
                running = [tasks.create_task(self._episode(index)) for index in indices]
        except ExceptionGroup as group:  # the first one ended the others
            raise group.exceptions[0] from None
        return [task.result() for task in running]

    def abort(self) -> None:
        """End the episodes under way, masked as ABANDONED with their steps so far."""
        self.aborted = True
        for each in self._tries.values():
            each.deadline.expire(ABORTED)

    async def _episode(self, index: int) -> Trajectory:
        lost = 0
        for number in range(1, self._settings.retries + 2):
            attempt = _Try(self._responder, self._settings.episode_timeout_seconds, self._occupancy.requests)
            self._tries[index] = attempt
            if self.aborted:
                attempt.deadline.expire(ABORTED)
            with self._occupancy.episodes.track():
                trajectory = await self._episodes.run_episode(
                    attempt, self.ticket, index, self._incarnation, attempt.deadline
                )
            if trajectory.outcome not in RETRYABLE_OUTCOMES or number > self._settings.retries:
                break
            log.info("episode %d of ticket %d is tried again after %s", index, self.ticket, trajectory.outcome)
            lost += trajectory.response_tokens
        if not trajectory.trainable:
            del self._tries[index]
        self.finished_episodes += 1
        return replace(trajectory, tries=number, discarded_tokens=lost)
