"""Leases of a browser server: at most `capacity` at a time, each with a lifetime."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0
SECRET_BYTES = 18
MAX_ENDED_LEASES = 4096  # ended leases whose reason is remembered

T = TypeVar("T")


class NoCapacity(Exception):
    """All sessions are leased."""


class LeaseExpired(Exception):
    """The lease is unknown or has ended; the message is one sentence."""


@dataclass
class ActiveLease(Generic[T]):
    """One lease and its resource."""

    id: str
    seconds: float  # lifetime from the last use
    owner: str
    resource: T
    deadline: float  # of the clock of Leases
    busy: bool = False  # an operation runs; the lease does not expire during it


class Leases(Generic[T]):
    """At most `capacity` leases; one neither used nor renewed for its lifetime has expired, even before
    `release_expired`. An id is the server's `instance_id`, for the router, and a secret, so nobody can guess it.
    """

    def __init__(
        self, capacity: int, instance_id: str, *, default_seconds: float = DEFAULT_LEASE_SECONDS,
        max_seconds: float = MAX_LEASE_SECONDS, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.capacity, self.instance_id = capacity, instance_id
        self.default_seconds, self.max_seconds = default_seconds, max_seconds
        self._clock = clock
        self._active: dict[str, ActiveLease[T]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    @property
    def free(self) -> int:
        """Number of sessions without a lease."""
        return self.capacity - len(self._active)

    def active(self) -> list[ActiveLease[T]]:
        """All leases, oldest first, with those that have expired but are not released yet."""
        return list(self._active.values())

    def grant(self, seconds: float | None, owner: str, resource: T) -> ActiveLease[T]:
        """Grant a lease of `seconds`; None: the default lifetime. Raises ValueError, NoCapacity."""
        lifetime = self.default_seconds if seconds is None else seconds
        if not 0 < lifetime <= self.max_seconds:
            raise ValueError(f"seconds: {lifetime:g} is not between 0 and {self.max_seconds:g}, the maximum lifetime")
        if not self.free:
            raise NoCapacity(f"all {self.capacity} sessions of this server are leased")
        id = f"{self.instance_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
        lease = self._active[id] = ActiveLease(id, lifetime, owner, resource, self._clock() + lifetime)
        return lease

    def find(self, lease_id: str) -> ActiveLease[T]:
        """The lease, unless it has ended. Raises LeaseExpired."""
        lease = self._active.get(lease_id)
        if lease is not None and not self._is_expired(lease):
            return lease
        if lease is not None:
            raise LeaseExpired(_expiry_message(lease))
        raise LeaseExpired(self._ended.get(lease_id, "this server knows no such lease"))

    def renew(self, lease: ActiveLease[T]) -> None:
        """Restart the lease's lifetime."""
        lease.deadline = self._clock() + lease.seconds

    def seconds_left(self, lease: ActiveLease[T]) -> float:
        """Seconds until the lease expires if unused; the full lifetime during an operation."""
        return lease.seconds if lease.busy else max(0.0, lease.deadline - self._clock())

    def release(self, lease: ActiveLease[T], reason: str) -> bool:
        """End the lease; False if it had ended before."""
        if self._active.pop(lease.id, None) is None:
            return False
        self._ended[lease.id] = reason
        if len(self._ended) > MAX_ENDED_LEASES:
            self._ended.popitem(last=False)
        return True

    def release_expired(self) -> list[ActiveLease[T]]:
        """End the expired leases and return them."""
        expired = [lease for lease in self._active.values() if self._is_expired(lease)]
        for lease in expired:
            self.release(lease, _expiry_message(lease))
        return expired

    def _is_expired(self, lease: ActiveLease[T]) -> bool:
        return not lease.busy and self._clock() >= lease.deadline


def _expiry_message(lease: ActiveLease[T]) -> str:
    return f"the lease has expired: neither used nor renewed for {lease.seconds:g} s"
