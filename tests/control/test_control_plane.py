"""The control plane with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.control.tickets import TicketEpoch, ticket_limit
from tests.waiting import until

SERVER = """
import sys
from pathlib import Path
from megatron_webrl.control.service import serve
serve("127.0.0.1", 0, "ring", Path(sys.argv[1]), seconds=60)
"""
MUTE = """
import sys
from megatron_webrl.control.client import ControlClient
ControlClient("127.0.0.1", int(sys.argv[1]), "mute", 1.0).start_heartbeat()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    path = tmp_path / "control.json"
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(path)])
    deadline = time.monotonic() + 30
    while not path.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fields = json.loads(path.read_text())
    yield fields["host"], fields["port"]
    process.kill()
    process.wait()


def connect(address: tuple[str, int], role: str, heartbeat_timeout_seconds: float = 10.0) -> ControlClient:
    return ControlClient(*address, role, heartbeat_timeout_seconds, connect_seconds=10)


def test_each_slot_is_claimed_once_and_none_beyond_the_limit(address: tuple[str, int]):
    trainer = connect(address, "trainer-0")
    trainer.start_ticket_epoch(TicketEpoch(0, 0, 10, (), 10), limit=110)
    taken: list[list[int]] = [[], [], []]

    def worker(number: int) -> None:
        control = connect(address, f"rollout-{number}")
        while (position := control.claim_slot()) is not None:
            taken[number].append(position)

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(position for part in taken for position in part) == list(range(10, 110))
    assert trainer.claimed_slots() == 110
    trainer.set_ticket_limit(111)
    assert trainer.claim_slot() == 110


def test_a_restarted_worker_finds_its_unfinished_claims(address: tuple[str, int]):
    start = TicketEpoch(0, 0, 5, (), 5)
    connect(address, "trainer-0").start_ticket_epoch(start, limit=12)
    first, other = connect(address, "rollout-0"), connect(address, "rollout-1")
    taken = [first.claim_slot() for _ in range(3)]
    assert other.claim_slot() == 8
    first.close_slot(taken[1])
    assert first.register_instance() == 1
    again = connect(address, "rollout-0")
    assert again.register_instance() == 2
    assert again.unfinished_claims(5) == [5, 7]
    assert other.unfinished_claims(5) == [8]
    assert again.claim_slot() == 9
    # An earlier instance died between its claim and advancing the counter: the slot is not lost.
    first.store.set("tickets/10", "rollout-0")
    assert other.claim_slot() == 11
    assert again.unfinished_claims(5) == [5, 7, 9, 10]


def test_a_cleared_role_is_not_lost_before_its_next_heartbeat(address: tuple[str, int]):
    control = connect(address, "launcher", heartbeat_timeout_seconds=0.2)
    control.store.set("heartbeat/rollout-0", "7")
    assert not control.is_lost("rollout-0")
    deadline = time.monotonic() + 10
    while not control.is_lost("rollout-0"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    control.clear_heartbeat("rollout-0")
    assert not control.is_lost("rollout-0")
    time.sleep(0.3)  # longer than heartbeat_timeout_seconds
    assert not control.is_lost("rollout-0")


def test_keep_alive_delays_the_exit_of_the_control_plane(tmp_path: Path):
    program = SERVER.replace(
        "from megatron_webrl.control.control_plane import",
        "from megatron_webrl.control import control_plane; control_plane.LINGER_SECONDS = 0.2\n"
        "from megatron_webrl.control.control_plane import",
    )
    path = tmp_path / "control.json"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)])
    until(path.is_file, "a control plane")
    fields = json.loads(path.read_text())
    trainer = connect((fields["host"], fields["port"]), "trainer-0")
    with trainer.keep_alive():
        trainer.end_job("finished")
        time.sleep(1.5)  # longer than it stays by itself
        assert process.poll() is None
    process.wait(20)


def test_an_instance_has_ended_once_its_role_registers_another_or_is_lost(address: tuple[str, int]):
    worker, control = connect(address, "rollout-0"), connect(address, "trainer-0", heartbeat_timeout_seconds=0.2)
    assert worker.register_instance() == 1
    worker.store.set("heartbeat/rollout-0", "7")
    assert not control.instance_has_ended("rollout-0.1")
    assert worker.register_instance() == 2
    assert control.instance_has_ended("rollout-0.1")
    assert not control.instance_has_ended("rollout-0.2")
    until(lambda: control.instance_has_ended("rollout-0.2"), "its loss")


def test_open_tickets_are_issued_again_before_later_ones():
    start = TicketEpoch(restart_epoch=1, version=3, first_slot=24, open_tickets=(20, 22, 25), next_ticket=27)
    assert [start.ticket_at(n) for n in range(24, 30)] == [20, 22, 25, 27, 28, 29]


def test_free_slots_are_those_below_the_limit(address: tuple[str, int]):
    trainer = connect(address, "trainer-0")
    trainer.start_ticket_epoch(TicketEpoch(0, 0, 5, (), 5), limit=8)
    assert trainer.free_slots() == 3
    assert trainer.claim_slot() == 5
    assert trainer.free_slots() == 2
    trainer.set_ticket_limit(6)  # does not occur in a job, and is no error
    assert trainer.free_slots() == 0


def test_the_ticket_limit_keeps_groups_trainable():
    assert ticket_limit(first_slot=0, surviving_tickets=0, closed_tickets=0, updates_ahead=0, groups_per_update=8) == 8
    assert (
        ticket_limit(first_slot=0, surviving_tickets=0, closed_tickets=3 * 8 + 5, updates_ahead=2, groups_per_update=8)
        == 53
    )
    # Behind a fence: 24 may be open, 10 of them are; four that are closed make room for as many.
    assert (
        ticket_limit(first_slot=100, surviving_tickets=10, closed_tickets=0, updates_ahead=2, groups_per_update=8)
        == 114
    )
    assert (
        ticket_limit(first_slot=100, surviving_tickets=10, closed_tickets=4, updates_ahead=2, groups_per_update=8)
        == 118
    )


def test_the_first_outcome_counts_and_reaches_every_role(address: tuple[str, int]):
    one, other = connect(address, "a"), connect(address, "b")
    other.check_job()
    one.end_job("failed: a: broken")
    other.end_job("finished")
    for control in (one, other):
        with pytest.raises(JobFailed, match="a: broken"):
            control.check_job()


def test_a_clean_end_is_no_failure(address: tuple[str, int]):
    control = connect(address, "a")
    control.end_job("finished")
    with pytest.raises(JobEnded):
        control.check_job()


def test_a_role_that_is_killed_is_named(address: tuple[str, int]):
    control = connect(address, "trainer-0", heartbeat_timeout_seconds=3.0)
    process = subprocess.Popen(
        [sys.executable, "-c", MUTE, str(address[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    control.wait_for_key("heartbeat/mute", 10, "a heartbeat")
    control.check_job(("mute",))
    process.kill()
    process.wait()
    with pytest.raises(JobFailed, match="mute is lost: no heartbeat for 3 s"):
        control.wait_for_key("never", 30, "nothing", ("mute",))


def test_a_timed_out_wait_names_its_object(address: tuple[str, int]):
    with pytest.raises(JobFailed, match="a waited 0 s for the manifest"):
        connect(address, "a").wait_for_key("weights/manifest", 0.2, "the manifest")


def test_an_unreachable_control_plane_is_an_error():
    with pytest.raises(JobFailed, match=r"cannot reach the control plane at 127\.0\.0\.1:1 within 1 s"):
        ControlClient("127.0.0.1", 1, "a", 10.0, connect_seconds=1.0)


def test_losing_the_control_plane_is_an_error(address: tuple[str, int], tmp_path: Path):
    control = connect(address, "a")
    os.kill(json.loads((tmp_path / "control.json").read_text())["pid"], signal.SIGKILL)
    with pytest.raises(JobFailed, match="lost the control plane"):
        control.wait_for_key("never", 20, "nothing")
