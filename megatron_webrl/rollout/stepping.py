"""Rounds of generation of a worker's episodes (rollout.stepping=lockstep)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

log = logging.getLogger(__name__)

ACTING, ENTERING, GENERATING, LEAVING = "acting", "waiting for a round", "generating", "waiting for its end"


class Lockstep:
    """Rounds of a worker's episodes: all generate, then all act.

    A round begins once every episode waits for it. No episode acts before all episodes of the round have their
    responses. An episode that ends leaves the round; the next round waits for an episode that starts during a round.

        a  reset | generate ....... | act    | generate ... | act
        b  reset | generate .. wait | act .. | generate ... | act
        c              reset, wait  .  wait  | generate .   wait | act

    After a wait of `timeout_seconds` an episode continues without the missing ones, which join the next round.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._members: set[LockstepMember] = set()

    @contextmanager
    def register_episode(self) -> Iterator[LockstepMember]:
        """Context of one episode, from before the reset to its end."""
        member = LockstepMember(self)
        self._members.add(member)
        try:
            yield member
        finally:
            self._members.discard(member)
            self.advance()

    def advance(self) -> None:
        """Let the episodes of a round act once none generates, and begin a round once all wait for it."""
        if not self.count(GENERATING):
            self.move(LEAVING, ACTING)
            if self.count(ENTERING) == len(self._members):
                self.move(ENTERING, GENERATING)

    def count(self, state: str) -> int:
        """Episodes in a state."""
        return sum(member.state == state for member in self._members)

    def move(self, state: str, following: str) -> None:
        """Move all episodes of a state to the following one."""
        for member in self._members:
            if member.state == state:
                member.state = following
                member.moved.set()


class LockstepMember:
    """One episode of a Lockstep."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.state, self.moved = ACTING, asyncio.Event()
        self._lockstep = lockstep

    @asynccontextmanager
    async def generation_phase(self) -> AsyncIterator[None]:
        """Context of one generation: entering waits until it may begin, leaving until the agent may act."""
        lockstep = self._lockstep
        try:
            while not await self._moves_on(ENTERING):
                if not lockstep.count(GENERATING) + lockstep.count(LEAVING):
                    log.warning("starting a round without %d episodes, which still act", lockstep.count(ACTING))
                    lockstep.move(ENTERING, GENERATING)
                    break
            yield
            if not await self._moves_on(LEAVING):
                log.warning("an episode acts before %d others, which have no response", lockstep.count(GENERATING))
        finally:
            self.state = ACTING
            lockstep.advance()

    async def _moves_on(self, state: str) -> bool:
        """Enter a state, and wait for its end; whether it came within the limit."""
        self.state = state
        self.moved.clear()
        self._lockstep.advance()
        try:
            async with asyncio.timeout(self._lockstep.timeout_seconds):
                await self.moved.wait()
        except TimeoutError:
            return self.moved.is_set()
        return True
