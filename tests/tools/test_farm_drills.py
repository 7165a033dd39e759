"""Short forms of the drills of a farm."""

from __future__ import annotations

import pytest

from tools.drills import farm_connections


@pytest.mark.alone
def test_slow_connections_delay_no_lease() -> None:
    result = farm_connections.run_drill(100, 12.0)
    assert not result.problems
    assert result.leases > 20
    assert {kind: longest for kind, longest in result.slow.longest.items() if longest >= 9.0}.keys() >= {
        "mute",
        "slow head",
    }


@pytest.mark.soak
@pytest.mark.alone
def test_a_thousand_slow_connections_delay_no_lease() -> None:
    assert not farm_connections.run_drill(1000, 75.0).problems
