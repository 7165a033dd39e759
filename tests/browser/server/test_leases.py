"""Leases with a fake clock."""

from __future__ import annotations

import asyncio

import pytest

from megatron_webrl.browser.server.browser_server import LeaseExpired, Leases, NoCapacity


class Clock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def book(places: int = 2) -> tuple[Leases[str], Clock]:
    clock = Clock()
    return Leases(places, clock=clock), clock


def test_leases_are_limited_by_capacity_and_a_release_frees_one() -> None:
    leases, _ = book()
    first = leases.grant(None, "a", "one")
    leases.grant(None, "b", "two")
    with pytest.raises(NoCapacity, match="all 2 sessions of this server are leased"):
        leases.grant(None, "c", "three")
    assert leases.release(first, "it has ended")
    assert not leases.release(first, "it has ended")
    with pytest.raises(LeaseExpired, match="it has ended"):
        leases.find(first.id)
    assert leases.grant(None, "c", "three").resource == "three"


def test_an_unused_lease_expires_even_before_release_expired() -> None:
    leases, clock = book(1)
    lease = leases.grant(10.0, "", "one")
    clock.now += 9.9
    leases.renew(leases.find(lease.id))
    clock.now += 9.9
    assert leases.find(lease.id) is lease
    assert leases.release_expired() == []
    clock.now += 0.1
    with pytest.raises(LeaseExpired, match="neither used nor renewed for 10 s"):
        leases.find(lease.id)
    assert leases.free == 0  # until release_expired is called
    assert leases.release_expired() == [lease]
    assert leases.free == 1
    with pytest.raises(LeaseExpired, match="neither used nor renewed for 10 s"):
        leases.find(lease.id)


def test_a_running_operation_keeps_a_lease_alive() -> None:
    leases, clock = book()
    lease = leases.grant(10.0, "", "one")
    loop = asyncio.new_event_loop()
    lease.running = loop.create_future()
    clock.now += 100
    assert leases.release_expired() == []
    assert leases.seconds_left(lease) == 10.0
    lease.running = None
    loop.close()
    assert leases.release_expired() == [lease]


def test_lifetimes_are_limited_and_ids_cannot_be_guessed() -> None:
    leases, _ = book(500)
    for seconds in (0.0, -1.0, 3601.0, float("nan")):
        with pytest.raises(ValueError, match="is not between 0 and 3600"):
            leases.grant(seconds, "", "")
    ids = {leases.grant(3600.0, "", "").id for _ in range(500)}
    assert len(ids) == 500
    assert all(len(name) >= 24 for name in ids)
    with pytest.raises(LeaseExpired, match="knows no such lease"):
        leases.find("guess")
