"""When agents generate: each as soon as it can, or all agents of a worker in lockstep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Protocol

log = logging.getLogger(__name__)


class EpisodeStepper(Protocol):
    """Delays the generations of one episode."""

    def generation_phase(self) -> AbstractAsyncContextManager[None]:
        """Context of one generation: entering waits until it may begin, leaving until the agent may act."""
        ...


class SteppingMode(Protocol):
    """Coordinates the episodes of a worker."""

    def register_episode(self) -> AbstractContextManager[EpisodeStepper]:
        """Context of one episode, from before the reset to its end."""
        ...


class FreeStepping:
    """Episodes do not wait for each other (rollout.stepping=free)."""

    def generation_phase(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def register_episode(self) -> AbstractContextManager[EpisodeStepper]:
        return nullcontext(self)


class Lockstep:
    """Rounds of a worker's episodes: all generate, then all act (rollout.stepping=lockstep).

    A round begins once every episode waits for it. No episode acts before all episodes of the round have their
    responses. An episode that ends leaves the round; the next round waits for an episode that starts during a round.

        a  reset | generate ....... | act    | generate ... | act
        b  reset | generate .. wait | act .. | generate ... | act
        c              reset, wait  .  wait  | generate .   wait | act

    After a wait of `timeout_seconds` an episode continues without the missing ones, which join the next round.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._members: set[_Member] = set()  # running episodes
        self._round: set[_Member] = set()  # episodes that still generate
        self._entering: dict[_Member, asyncio.Future[None]] = {}
        self._leaving: dict[_Member, asyncio.Future[None]] = {}

    @contextmanager
    def register_episode(self) -> Iterator[EpisodeStepper]:
        member = _Member(self)
        self._members.add(member)
        try:
            yield member
        finally:
            self._members.discard(member)
            self._advance()

    async def wait_for_round_start(self, member: _Member) -> None:
        began = self._entering[member] = asyncio.get_running_loop().create_future()
        try:
            self._advance()
            while not await _done(began, self._timeout_seconds):
                if not self._round and not self._leaving:
                    missing = len(self._members) - len(self._entering)
                    log.warning(
                        "starting a round without %d episodes, which did not finish their actions within %g s",
                        missing,
                        self._timeout_seconds,
                    )
                    self._begin()
        finally:
            self._entering.pop(member, None)

    async def wait_for_round_end(self, member: _Member) -> None:
        """Wait until all episodes of the round have their responses."""
        over = self._leaving[member] = asyncio.get_running_loop().create_future()
        try:
            self.stop_generating(member)
            if not await _done(over, self._timeout_seconds):
                log.warning(
                    "an episode acts before %d other episodes, which have no response within %g s",
                    len(self._round),
                    self._timeout_seconds,
                )
        finally:
            self._leaving.pop(member, None)
            self._advance()

    def stop_generating(self, member: _Member) -> None:
        self._round.discard(member)
        self._advance()

    def _advance(self) -> None:
        if self._round:
            return
        for over in self._leaving.values():
            _resolve(over)
        if not self._leaving and self._entering and len(self._members) == len(self._entering):
            self._begin()

    def _begin(self) -> None:
        self._round = set(self._entering)
        for began in self._entering.values():
            _resolve(began)
        self._entering.clear()


class _Member:
    """One episode of a Lockstep."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep

    @asynccontextmanager
    async def generation_phase(self) -> AsyncIterator[None]:
        try:
            await self._lockstep.wait_for_round_start(self)
            yield
        except BaseException:
            self._lockstep.stop_generating(self)
            raise
        await self._lockstep.wait_for_round_end(self)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _done(future: asyncio.Future[None], timeout_seconds: float) -> bool:
    """Whether the future completes within the limit."""
    await asyncio.wait((future,), timeout=timeout_seconds)
    return future.done()
