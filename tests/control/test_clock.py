"""The estimate of another machine's clock, with simulated delays and over a real service."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.clock import EXCHANGES, ServiceClock, clock_identity, stamp
from tests.control.relay_process import relay_process
from tests.control.service_process import service_process
from tests.waiting import until

AHEAD = 5_000_000  # seconds
ROLE = """
import dataclasses, json, sys, time
from pathlib import Path
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.clock import clock_identity
control = ControlClient(Path(sys.argv[1]), "rollout-0")
control.start_heartbeat()
deadline = time.monotonic() + 30
while control.service_clock() is None and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps([clock_identity(), dataclasses.asdict(control.service_clock())]))
"""


def exchange(clock: ServiceClock, now: float, ahead: float, there: float, back: float, held: float = 0.0) -> None:
    """An exchange that begins at `now` with a service whose clock is `ahead`, delayed on both ways and held there."""
    received = now + there + ahead
    times: dict[str, Any] = {"clock": "far", "received": received, "answered": received + held, "error": 0.0}
    clock.add(now, times, now + there + held + back)


@pytest.mark.parametrize("ahead", [0.0, 1234.5, -98765.4321])
@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_at_most_half_of_the_shortest_round_trip(ahead: float, seed: int) -> None:
    chance, clock, shortest = random.Random(seed), ServiceClock(), 1e9
    for second in range(EXCHANGES):
        there, back = chance.expovariate(200), chance.expovariate(20)  # the way back is ten times as slow
        exchange(clock, 1000.0 + second, ahead, there, back, held=chance.random())
        shortest = min(shortest, there + back)
        best = clock.best()
        assert best is not None
        assert best.error == pytest.approx(shortest / 2, abs=1e-9)
        assert abs(best.offset - ahead) <= best.error + 1e-9


def test_an_exchange_that_is_all_delay_on_one_way_is_as_wrong_as_its_bound() -> None:
    clock = ServiceClock()
    exchange(clock, 50.0, ahead=7.0, there=0.2, back=0.0)
    best = clock.best()
    assert best is not None
    assert best.error == pytest.approx(0.1)
    assert best.offset == pytest.approx(7.1)


def test_old_exchanges_are_forgotten_so_that_a_clock_that_drifts_is_followed() -> None:
    clock = ServiceClock()
    exchange(clock, 0.0, ahead=5.0, there=0.0001, back=0.0001)
    for second in range(1, EXCHANGES + 1):
        exchange(clock, float(second), ahead=5.001, there=0.001, back=0.001)
    best = clock.best()
    assert best is not None
    assert best.offset == pytest.approx(5.001)


def test_a_service_on_another_machine_replaces_all_earlier_estimates() -> None:
    clock = ServiceClock()
    exchange(clock, 0.0, ahead=5.0, there=0.0001, back=0.0001)
    clock.add(9.0, {"clock": "farther", "received": 109.0, "answered": 109.0, "error": 0.0}, 11.0)
    best = clock.best()
    assert best is not None
    assert (best.clock, best.offset, best.error) == ("farther", 99.0, 1.0)


def test_the_answer_of_a_relay_adds_its_own_error() -> None:
    relay, role = ServiceClock(), ServiceClock()
    assert stamp(0.0, relay.best()) is None
    role.add(0.0, stamp(0.0, relay.best()), 0.1)
    assert role.best() is None
    exchange(relay, 10.0, ahead=3.0, there=0.01, back=0.03)
    times = stamp(20.0, relay.best())
    assert times is not None
    assert times["received"] == pytest.approx(20.0 + 3.0, abs=0.02)
    role.add(20.0 - 0.001, times | {"answered": times["received"]}, 20.0 + 0.001)
    best = role.best()
    assert best is not None
    assert best.error == pytest.approx(0.02 + 0.001)
    assert abs(best.offset - 3.0) <= best.error


def test_a_role_knows_the_clock_of_the_service_directly_and_through_a_relay(tmp_path: Path) -> None:
    with service_process(tmp_path) as service, relay_process(service.address) as relay:
        for port in (0, relay.port):
            control = ControlClient(service.address, f"rollout-{port}", relay_port=port)
            assert control.service_clock() is None
            control.start_heartbeat()
            until(lambda control=control: control.service_clock() is not None, "an estimate")
            best = control.service_clock()
            assert best is not None
            # One machine: the true offset is 0.
            assert best.clock == clock_identity()
            assert abs(best.offset) <= best.error < 1.0
            control.close()


def test_the_clock_of_a_machine_that_was_started_at_another_time_is_found(tmp_path: Path) -> None:
    command = ["unshare", "--time", "--fork", f"--monotonic={AHEAD}"]
    if subprocess.run([*command, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs time namespaces")
    with service_process(tmp_path) as service:
        role = subprocess.run(
            [*command, sys.executable, "-c", ROLE, str(service.address)], check=True, stdout=subprocess.PIPE, timeout=60
        )
        own, found = json.loads(role.stdout)
    assert own != found["clock"] == clock_identity()
    assert abs(found["offset"] + AHEAD) <= found["error"] < 1.0
