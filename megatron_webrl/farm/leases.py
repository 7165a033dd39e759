"""Who holds which place of a node, and for how long."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0
SECRET_BYTES = 18
MAX_ENDED_LEASES = 4096  # leases that have ended, to say how

T = TypeVar("T")


class NoCapacity(Exception):
    """All places are taken."""


class LeaseExpired(Exception):
    """A lease that is not or no longer held; the message is one sentence."""


@dataclass
class ActiveLease(Generic[T]):
    """One lease and what belongs to it."""

    id: str
    seconds: float  # lifetime from the last use
    owner: str
    resource: T
    deadline: float  # of the book's clock
    busy: bool = False  # with an operation; the lease does not expire meanwhile


class Leases(Generic[T]):
    """At most `places` leases at a time. A lease that is neither used nor renewed for its lifetime has expired, whether
    or not anyone has swept it up.

    An id is the node's `boot` and a secret: nobody can guess it, and a router can tell which node gave it.
    """

    def __init__(
        self, capacity: int, instance_id: str, *, default_seconds: float = DEFAULT_LEASE_SECONDS, max_seconds: float = MAX_LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.capacity, self.instance_id = capacity, instance_id
        self.default_seconds, self.max_seconds = default_seconds, max_seconds
        self._clock = clock
        self._held: dict[str, ActiveLease[T]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self.capacity - len(self._held)

    def active(self) -> list[ActiveLease[T]]:
        """All leases, oldest first; those that have expired but are not swept yet too, for they hold a place."""
        return list(self._held.values())

    def grant(self, seconds: float | None, owner: str, resource: T) -> ActiveLease[T]:
        """A lease for `seconds`, or as long as is usual. Raises ValueError, NoPlace."""
        life = self.default_seconds if seconds is None else seconds
        if not 0 < life <= self.max_seconds:
            raise ValueError(f"seconds: {life:g} is not between 0 and {self.max_seconds:g}, the longest lifetime here")
        if not self.free:
            raise NoCapacity(f"all {self.capacity} sessions of this node are leased")
        name = f"{self.instance_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
        lease = self._held[name] = ActiveLease(name, life, owner, resource, self._clock() + life)
        return lease

    def find(self, lease_id: str) -> ActiveLease[T]:
        """The lease, unless it has expired. Raises NotHeld."""
        lease = self._held.get(lease_id)
        if lease is not None and not self._is_over(lease):
            return lease
        if lease is not None:
            raise LeaseExpired(_expired(lease))
        raise LeaseExpired(self._ended.get(lease_id, "this node knows no such lease"))

    def renew(self, lease: ActiveLease[T]) -> None:
        """Its life begins anew."""
        lease.deadline = self._clock() + lease.seconds

    def seconds_left(self, lease: ActiveLease[T]) -> float:
        """Until it expires if nothing is done; its whole life while an operation is under way."""
        return lease.seconds if lease.busy else max(0.0, lease.deadline - self._clock())

    def release(self, lease: ActiveLease[T], reason: str) -> bool:
        """Free its place; False if that has been done."""
        if self._held.pop(lease.id, None) is None:
            return False
        self._ended[lease.id] = reason
        if len(self._ended) > MAX_ENDED_LEASES:
            self._ended.popitem(last=False)
        return True

    def release_expired(self) -> list[ActiveLease[T]]:
        """Release what has expired, and return it."""
        over = [lease for lease in self._held.values() if self._is_over(lease)]
        for lease in over:
            self.release(lease, _expired(lease))
        return over

    def _is_over(self, lease: ActiveLease[T]) -> bool:
        return not lease.busy and self._clock() >= lease.deadline


def _expired(lease: ActiveLease[T]) -> str:
    return f"the lease has expired: neither used nor renewed for {lease.seconds:g} s"
