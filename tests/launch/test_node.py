"""What a node does about roles that fail: real processes and control service."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import SupervisedProcess
from megatron_webrl.control.client import ControlClient, TicketClaim
from megatron_webrl.control.connection import ControlLost, JobEnded, JobFailed
from megatron_webrl.launch import watchdog
from megatron_webrl.launch.first_node import role_line
from megatron_webrl.launch.node import Node
from megatron_webrl.monitor.roles import CONTROL
from megatron_webrl.rollout.group import TicketClaims
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.types import is_infrastructure_failure
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE
from tests.job_control import claim_tickets, connect, control_service, start, tickets
from tests.waiting import until

SLEEPS = [sys.executable, "-c", "import time; print('served', flush=True); time.sleep(600)"]


class Machine:
    """Roles of this machine and their node."""

    def __init__(self, folder: Path, address: tuple[str, int], *settings: str) -> None:
        self.config = parse_config(None, [f"run.directory={folder}", "run.name=here", *settings])
        self.control = connect(address, "launcher")
        self.messages: list[str] = []
        self.node = Node(self.config, 0, self.messages.append)
        self.node._control = self.control

    def start(self, name: str, command: list[str] = SLEEPS) -> SupervisedProcess:
        log = self.config.run_folder / f"{name}.log"
        return self.node.start(name, command, dict(os.environ), log)

    def poll_until(self, condition: str, role: SupervisedProcess) -> None:
        """Poll until a role "runs" or "ended"."""

        def holds() -> bool:
            assert self.node.poll_failures() is None
            if condition == "runs":
                return role.restart_at is None and role.process.last_line() == "served"
            return not role.is_active

        until(holds, f"{role.name} {condition}")


@contextmanager
def machine(folder: Path, *settings: str) -> Iterator[Machine]:
    (folder / "here").mkdir(exist_ok=True)
    with control_service(folder) as address:
        made = Machine(folder, address, *settings)
        try:
            yield made
        finally:
            for role in made.node.roles:
                child_process.kill_process_group(role.process.pid)


def test_a_worker_beyond_its_budget_is_given_up_and_the_job_continues_down_to_the_least_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "FIRST_DELAY_SECONDS", 0.2)
    with machine(tmp_path, "rollout.engines=2", "run.worker_restarts_per_hour=2") as here:
        first, second = here.start("rollout-0"), here.start("rollout-1")
        for number in (1, 2):
            here.poll_until("runs", first)
            first.process.kill()
            first.process.wait()
            assert here.node.poll_failures() is None
            assert len(here.messages) == number
            failure = f"rollout-0 killed by SIGKILL; last log line: served (log: {first.log})"
            assert here.messages[-1].startswith(f"{failure}; restarting rollout-0 ")
            assert here.messages[-1].endswith(f"(restart {number} of 2 within an hour)")
        here.poll_until("runs", first)
        first.process.kill()
        here.poll_until("ended", first)
        assert here.messages[2:] == [
            f"{failure}; run.worker_restarts_per_hour=2 is used up: rollout-0 is given up, the job continues with "
            "1 of 2 engines"
        ]
        assert list(here.control.given_up_workers()) == ["rollout-0"]
        lines = [role_line(here.node, role, here.control.job_status()) for role in (first, second)]
        assert [(line.name, line.state, line.status, line.restarts) for line in lines] == [
            ("rollout-0", "failed", "given up", 2), ("rollout-1", "starting", "starting", 0)
        ]  # fmt: skip
        assert here.control.instance_has_ended("rollout-0.3")
        second.policy.max_restarts = 0
        second.process.kill()
        until(lambda: second.process.poll() is not None, "its end")
        outcome = here.node.poll_failures()
        assert outcome == (
            f"failed: rollout-1 killed by SIGKILL; last log line: served (log: {second.log}); "
            "run.worker_restarts_per_hour=2 is used up, and 0 of 2 engines are left, and rollout.min_engines=1"
        )
        assert here.node.poll_failures() is None  # reported once
        found = [(each.role, each.event) for each in events.read_events(here.config.run_folder)]
        assert found == [
            ("rollout-0", events.RESTARTED), ("rollout-0", events.RESTARTED), ("rollout-0", events.FAILED),
            ("rollout-1", events.FAILED),
        ]  # fmt: skip


def test_a_worker_that_never_served_is_not_restarted(tmp_path: Path) -> None:
    with machine(tmp_path, "rollout.engines=2") as here:
        role = here.start("rollout-1", [sys.executable, "-c", "import sys; sys.exit('ERROR a bad setting')"])
        here.poll_until("ended", role)
        assert here.messages == [
            f"rollout-1 exited with code 1; last log line: ERROR a bad setting (log: {role.log}); it failed before it "
            "had served: rollout-1 is given up, the job continues with 1 of 2 engines"
        ]


def test_the_worker_of_a_follower_that_is_given_up_ends_itself(tmp_path: Path) -> None:
    spanning = ("cluster.nodes=2", "trainer.data_parallel=2", "rollout.pipeline_parallel=2", "rollout.engines=2")
    with machine(tmp_path, *spanning, "run.worker_restarts_per_hour=0") as here:
        worker = ControlClient(here.control.address_file, "rollout-1")
        other = ControlClient(here.control.address_file, "rollout-0")
        role = here.start("rollout-1.follower-1")
        here.poll_until("runs", role)
        worker.check_job()
        role.process.kill()
        here.poll_until("ended", role)
        with pytest.raises(JobEnded):
            worker.check_job()
        other.check_job()
        with pytest.raises(JobFailed, match=r"rollout-1 is lost: it was given up: rollout-1\.follower-1 killed"):
            here.control.check_job(("rollout-1",))
        part = here.start("rollout-1", [sys.executable, "-c", "import sys; sys.exit(1)"])
        here.poll_until("ended", part)
        assert len(here.messages) == 1  # its failure is no other one
        assert role_line(here.node, part, here.control.job_status()).status == "given up"


def test_a_role_that_lost_its_file_system_ends_the_job_as_a_failure_of_the_infrastructure(tmp_path: Path) -> None:
    lost = [sys.executable, "-c", f"import sys; sys.exit({INFRASTRUCTURE_EXIT_CODE})"]
    with machine(tmp_path, "rollout.engines=1", "run.max_trainer_restarts=0") as here:
        for name in ("rollout-0", "trainer-0"):
            role = here.start(name, lost)
            until(lambda role=role: role.process.poll() is not None, "its end")
            outcome = here.node.poll_failures()
            assert outcome is not None
            assert is_infrastructure_failure(outcome)
            assert outcome.startswith(f"failed: infrastructure: {name} exited with code 74")
        refused = here.start("trainer-0", [sys.executable, "-c", "import sys; sys.exit(2)"])
        until(lambda: refused.process.poll() is not None, "its end")
        outcome = here.node.poll_failures()
        assert outcome is not None
        assert not is_infrastructure_failure(outcome)


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system on which every call that changes it waits, until the end of the test."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    for command in (
        f"truncate -s 20M {image}", f"mkfs.ext4 -q {image}", f"mount -o loop {image} {folder}", f"fsfreeze -f {folder}",
    ):  # fmt: skip
        if subprocess.run(command.split(), capture_output=True, timeout=60, check=False).returncode:
            pytest.skip(f"{command.split()[0]} does not work here")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], check=True, timeout=60)
    until(lambda: subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0, "umount")


def test_a_role_that_waits_for_a_dead_file_system_ends_the_job_although_it_cannot_be_killed(
    tmp_path: Path, stalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "KILL_SECONDS", 2.0)
    with machine(tmp_path, "rollout.engines=1") as here:
        role = here.start("rollout-0", [sys.executable, "-c", f"open({str(stalled / 'file')!r}, 'w')"])
        until(lambda: psutil.Process(role.process.pid).status() == psutil.STATUS_DISK_SLEEP, "its wait")
        dumper = watchdog.StackDumper(EventLog(here.config.run_folder), here.messages.append)
        watchdog.request_stack_dump(here.config.run_folder, "it hangs", {"rollout-0": ("heartbeat", "")})
        dumper.poll(here.node.roles, lambda: here.control)
        outcome = here.node.poll_failures()
        assert outcome is not None
        assert outcome.startswith(
            "failed: infrastructure: rollout-0 runs 2 s after SIGKILL, in a call to a file system"
        )
        assert here.node.poll_failures() is None


def test_the_unfinished_tickets_of_a_worker_given_up_are_run_once_by_the_others(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        trainer = connect(address, "trainer-0")
        lost, *others = (connect(address, f"rollout-{number}") for number in range(3))
        trainer.start_ticket_epoch(0, 0, tickets(range(6)))
        assert [claim.ticket for claim in claim_tickets(lost, 6)] == [0, 1, 2, 3, 4, 5]
        lost.close_ticket(1)
        first, second = (TicketClaims(each, 2) for each in others)
        assert first.claim(4) + second.claim(4) == []  # all are claimed
        trainer.give_up_worker("rollout-0", "it failed")
        found: dict[TicketClaims, list[TicketClaim]] = {first: [], second: []}

        def claim(count: int) -> bool:
            for claims, mine in found.items():
                mine += claims.claim(count - len(mine))
            return sum(map(len, found.values())) == 5

        until(lambda: claim(3), "the tickets of the worker")
        assert sorted(each.ticket for mine in found.values() for each in mine) == [0, 2, 3, 4, 5]
        owners = {each.ticket: f"rollout-{number}" for number, mine in enumerate(found.values(), 1) for each in mine}
        assert dict(trainer.run("read_queue", "tickets")["open"]) == owners
        again = TicketClaims(others[1], 2)  # another instance of rollout-2 finds what it had taken over
        assert sorted(again.claim(4), key=lambda each: each.ticket) == sorted(
            found[second], key=lambda each: each.ticket
        )
        trainer.issue_tickets(tickets(range(6, 12)))  # the instances of rollout-2 may take some
        later: list[TicketClaim] = []
        until(lambda: later.extend(first.claim(1)) or later, "a later ticket")  # type: ignore[func-returns-value]
        assert later[0].ticket in range(6, 12)


def test_a_delay_holds_no_other_role_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "FIRST_DELAY_SECONDS", 600.0)
    monkeypatch.setattr(child_process, "MAX_DELAY_SECONDS", 600.0)
    with machine(tmp_path, "rollout.engines=2") as here:
        first, second = here.start("rollout-0"), here.start("rollout-1")
        for role in (first, first, second):
            here.poll_until("runs", role)
            role.process.kill()
            role.process.wait()
            begun = time.monotonic()
            assert here.node.poll_failures() is None
            assert time.monotonic() - begun < 30
        assert first.restart_at is not None
        assert here.node._is_active
        here.poll_until("runs", second)


def test_nothing_waits_for_a_control_service_that_has_exited_after_the_end_of_the_job(tmp_path: Path) -> None:
    address, thread = start(tmp_path)
    here = Machine(tmp_path, address)
    role = here.start(CONTROL, [sys.executable, "-c", ""])
    until(lambda: not role.is_active, "its end")
    launcher = ControlClient(address, "launcher", lost_seconds=20.0, while_lost=here.node.restart_control)
    launcher.end_job("finished")
    launcher.shutdown()
    thread.join()
    started = time.monotonic()
    with pytest.raises(ControlLost, match="has exited after the end of the job"):
        launcher.job_end()
    launcher.shutdown()
    assert time.monotonic() - started < 15.0
