"""When agents generate: each as soon as it can, or all of a worker in step."""

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
    """Of one episode."""

    def generation_phase(self) -> AbstractAsyncContextManager[None]:
        """Around one generation: entering waits until it may begin, leaving until the agent may act."""
        ...


class SteppingMode(Protocol):
    """Of all episodes of a worker."""

    def register_episode(self) -> AbstractContextManager[EpisodeStepper]:
        """From before the reset to the end of one episode."""
        ...


class FreeStepping:
    """Nobody waits for anybody (rollout.stepping=free)."""

    def generation_phase(self) -> AbstractAsyncContextManager[None]:
        """Nothing."""
        return nullcontext()

    def register_episode(self) -> AbstractContextManager[EpisodeStepper]:
        """The same for every episode."""
        return nullcontext(self)


class Lockstep:
    """Rounds of a worker's episodes: all generate, then all act (rollout.stepping=lockstep).

    A round begins once every episode waits for it, and takes all of them in; nobody acts before the last of the round
    has its answer. An episode that ends or breaks off leaves. One that starts while a round runs is waited for before
    the next.

        a  reset | generate ....... | act    | generate ... | act
        b  reset | generate .. wait | act .. | generate ... | act
        c              reset, wait  .  wait  | generate .   wait | act

    Whoever has waited `seconds` for the others goes on without those that are missing; they come in with the next
    round.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: the limit of one wait."""
        self._seconds = seconds
        self._members: set[_Member] = set()  # episodes under way
        self._round: set[_Member] = set()  # who still generates
        self._entering: dict[_Member, asyncio.Future[None]] = {}
        self._leaving: dict[_Member, asyncio.Future[None]] = {}

    @contextmanager
    def register_episode(self) -> Iterator[EpisodeStepper]:
        """A member from here to the end of the episode."""
        member = _Member(self)
        self._members.add(member)
        try:
            yield member
        finally:
            self._members.discard(member)
            self._advance()

    async def wait_for_round_start(self, member: _Member) -> None:
        """Wait for the next round to begin."""
        began = self._entering[member] = asyncio.get_running_loop().create_future()
        try:
            self._advance()
            while not await _done(began, self._seconds):
                if not self._round and not self._leaving:
                    missing = len(self._members) - len(self._entering)
                    log.warning("a round begins without %d episodes that are not back in %g s", missing, self._seconds)
                    self._begin()
        finally:
            self._entering.pop(member, None)

    async def wait_for_round_end(self, member: _Member) -> None:
        """Wait for the rest of the round to have its answers."""
        over = self._leaving[member] = asyncio.get_running_loop().create_future()
        try:
            self.stop_generating(member)
            if not await _done(over, self._seconds):
                log.warning(
                    "an episode acts before %d others have their answers in %g s", len(self._round), self._seconds
                )
        finally:
            self._leaving.pop(member, None)
            self._advance()

    def stop_generating(self, member: _Member) -> None:
        """The member does not generate any more."""
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
    """One episode in a Lockstep."""

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


async def _done(future: asyncio.Future[None], seconds: float) -> bool:
    """Whether the future comes within the limit."""
    await asyncio.wait((future,), timeout=seconds)
    return future.done()
