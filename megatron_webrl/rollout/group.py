"""One group while it runs: its episodes, their tries, and its end before time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron_webrl.config import RolloutConfig
from megatron_webrl.farm.client import RemoteSession
from megatron_webrl.rollout.generation import Generation, Responder
from megatron_webrl.rollout.limit import Limit
from megatron_webrl.rollout.occupancy import Level, Occupancy
from megatron_webrl.types import ABANDONED, Trajectory

log = logging.getLogger(__name__)

RETRIED_OUTCOMES = frozenset(
    {"browser_error", "browser_crashed", "browser_timeout", "page_crashed", "lease_lost", "engine_error"}
)
"""Failures of the machinery that another try may not meet. Others say something about the page or the policy."""


class Runs(Protocol):
    """What runs one try at an episode: rollout.episodes.Episodes."""

    async def run(
        self, responder: Responder, ticket: int, index: int, incarnation: int, limit: Limit | None = None
    ) -> Trajectory:
        """The try's trajectory; a failure masks it and does not raise."""
        ...


class _Try:
    """One try at an episode: the responder that its agent asks, its limit, and the oldest version it has used."""

    def __init__(self, responder: Responder, seconds: float, requests: Level) -> None:
        self.limit = Limit(seconds)
        self.oldest: int | None = None
        self._responder, self._requests = responder, requests

    async def respond(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        """What the responder says, noted."""
        with self._requests.one():
            generation = await self._responder.respond(session, token_ids, images)
        versions = generation.versions.tolist()
        self.oldest = min(versions if self.oldest is None else [self.oldest, *versions], default=None)
        return generation


class GroupRun:
    """The episodes of one ticket.

    An episode that the machinery failed is tried again, rollout.retries times; a try that is replaced is not an
    episode: it is counted by the trajectory that replaced it (Trajectory.tries, lost_tokens).
    """

    def __init__(
        self, episodes: Runs, responder: Responder, ticket: int, incarnation: int, settings: RolloutConfig,
        occupancy: Occupancy,
    ) -> None:  # fmt: skip
        self.ticket, self.abandoned = ticket, False
        self._episodes, self._responder, self._incarnation = episodes, responder, incarnation
        self._settings, self._occupancy = settings, occupancy
        self._tries: dict[int, _Try] = {}  # by index; those under way and those that count
        self.finished = 0  # episodes

    @property
    def generating(self) -> bool:
        """Whether an episode of the group is under way."""
        return self.finished < self._settings.group_size

    @property
    def oldest(self) -> int | None:
        """The oldest policy version among the responses of the group that count so far."""
        return min((each.oldest for each in self._tries.values() if each.oldest is not None), default=None)

    async def run(self) -> list[Trajectory]:
        """All trajectories, in the order of their indices. Raises what is no failure of a single episode."""
        try:
            async with asyncio.TaskGroup() as tasks:
                indices = range(self._settings.group_size)
                running = [tasks.create_task(self._episode(index)) for index in indices]
        except ExceptionGroup as group:  # the first one ended the others
            raise group.exceptions[0] from None
        return [task.result() for task in running]

    def abandon(self) -> None:
        """End the episodes under way, masked as ABANDONED with their steps so far."""
        self.abandoned = True
        for each in self._tries.values():
            each.limit.end(ABANDONED)

    async def _episode(self, index: int) -> Trajectory:
        lost = 0
        for number in range(1, self._settings.retries + 2):
            attempt = _Try(self._responder, self._settings.episode_seconds, self._occupancy.requests)
            self._tries[index] = attempt
            if self.abandoned:
                attempt.limit.end(ABANDONED)
            with self._occupancy.episodes.one():
                trajectory = await self._episodes.run(attempt, self.ticket, index, self._incarnation, attempt.limit)
            if trajectory.outcome not in RETRIED_OUTCOMES or number > self._settings.retries:
                break
            log.info("episode %d of ticket %d is tried again after %s", index, self.ticket, trajectory.outcome)
            lost += trajectory.response_tokens
        if not trajectory.trainable:
            del self._tries[index]
        self.finished += 1
        return replace(trajectory, tries=number, lost_tokens=lost)
