"""Short forms of the drills of a farm."""

from __future__ import annotations

import pytest

from tools.drills import farm_api, farm_connections


@pytest.mark.alone
def test_slow_connections_delay_no_lease() -> None:
    result = farm_connections.run_drill(100, 12.0)
    assert not result.problems
    assert result.leases > 20
    assert min(result.slow.longest[kind] for kind in ("mute", "slow head", "slow body")) > 9.0  # the limit ended them


@pytest.mark.soak
@pytest.mark.alone
def test_a_thousand_slow_connections_delay_no_lease() -> None:
    assert not farm_connections.run_drill(1000, 75.0).problems


def test_generated_requests_get_declared_responses() -> None:
    results = farm_api.run_drill(200)
    assert [result.problems for result in results] == [[], []]
    assert min(result.requests for result in results) >= 200
    assert {200, 400} <= results[0].statuses["POST /v1/leases/{lease}/reset"].keys()


@pytest.mark.soak
def test_thousands_of_generated_requests_get_declared_responses() -> None:
    assert [result.problems for result in farm_api.run_drill(5000)] == [[], []]
