"""Who holds which place of a node, and for how long."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

DEFAULT_SECONDS, MAX_SECONDS = 60.0, 3600.0
SECRET_BYTES = 18
REMEMBERED = 4096  # leases that have ended, to say how

T = TypeVar("T")


class NoPlace(Exception):
    """All places are taken."""


class NotHeld(Exception):
    """A lease that is not or no longer held; the message is one sentence."""


@dataclass
class Held(Generic[T]):
    """One lease and what belongs to it."""

    id: str
    seconds: float  # lifetime from the last use
    owner: str
    place: T
    deadline: float  # of the book's clock
    busy: bool = False  # with an operation; the lease does not expire meanwhile


class Leases(Generic[T]):
    """At most `places` leases at a time. A lease that is neither used nor renewed for its lifetime has expired, whether
    or not anyone has swept it up.

    An id is the node's `boot` and a secret: nobody can guess it, and a router can tell which node gave it.
    """

    def __init__(
        self, places: int, boot: str, *, default_seconds: float = DEFAULT_SECONDS, max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.places, self.boot = places, boot
        self.default_seconds, self.max_seconds = default_seconds, max_seconds
        self._clock = clock
        self._held: dict[str, Held[T]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self.places - len(self._held)

    def held(self) -> list[Held[T]]:
        """All leases, oldest first; those that have expired but are not swept yet too, for they hold a place."""
        return list(self._held.values())

    def grant(self, seconds: float | None, owner: str, place: T) -> Held[T]:
        """A lease for `seconds`, or as long as is usual. Raises ValueError, NoPlace."""
        life = self.default_seconds if seconds is None else seconds
        if not 0 < life <= self.max_seconds:
            raise ValueError(f"seconds: {life:g} is not between 0 and {self.max_seconds:g}, the longest lifetime here")
        if not self.free:
            raise NoPlace(f"all {self.places} sessions of this node are leased")
        name = f"{self.boot}-{secrets.token_urlsafe(SECRET_BYTES)}"
        lease = self._held[name] = Held(name, life, owner, place, self._clock() + life)
        return lease

    def find(self, name: str) -> Held[T]:
        """The lease, unless it has expired. Raises NotHeld."""
        lease = self._held.get(name)
        if lease is not None and not self._is_over(lease):
            return lease
        if lease is not None:
            raise NotHeld(_expired(lease))
        raise NotHeld(self._ended.get(name, "this node knows no such lease"))

    def renew(self, lease: Held[T]) -> None:
        """Its life begins anew."""
        lease.deadline = self._clock() + lease.seconds

    def seconds_left(self, lease: Held[T]) -> float:
        """Until it expires if nothing is done; its whole life while an operation is under way."""
        return lease.seconds if lease.busy else max(0.0, lease.deadline - self._clock())

    def release(self, lease: Held[T], reason: str) -> bool:
        """Free its place; False if that has been done."""
        if self._held.pop(lease.id, None) is None:
            return False
        self._ended[lease.id] = reason
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return True

    def sweep(self) -> list[Held[T]]:
        """Release what has expired, and return it."""
        over = [lease for lease in self._held.values() if self._is_over(lease)]
        for lease in over:
            self.release(lease, _expired(lease))
        return over

    def _is_over(self, lease: Held[T]) -> bool:
        return not lease.busy and self._clock() >= lease.deadline


def _expired(lease: Held[T]) -> str:
    return f"the lease has expired: neither used nor renewed for {lease.seconds:g} s"
