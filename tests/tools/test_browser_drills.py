"""Short forms of the drills of browser servers."""

from __future__ import annotations

import pytest

from tools.drills import browser_api, browser_connections


@pytest.mark.alone
def test_slow_connections_delay_no_lease() -> None:
    result = browser_connections.run_drill(100, 12.0)
    assert not result.problems
    assert result.leases > 20
    assert min(result.slow.longest[kind] for kind in ("mute", "slow head", "slow body")) > 9.0  # the limit ended them


@pytest.mark.soak
@pytest.mark.alone
def test_a_thousand_slow_connections_delay_no_lease() -> None:
    assert not browser_connections.run_drill(1000, 75.0).problems


def test_generated_requests_get_declared_responses() -> None:
    result = browser_api.run_drill(200)
    assert not result.problems
    assert result.requests >= 200
    assert {200, 400} <= result.statuses["POST /v1/leases/{lease}/reset"].keys()


@pytest.mark.soak
def test_thousands_of_generated_requests_get_declared_responses() -> None:
    assert not browser_api.run_drill(5000).problems
