"""What a node does about roles that fail or hang: real processes and control service."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process, facts
from megatron_webrl.control.child_process import SupervisedProcess
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import ControlLost, JobEnded, JobFailed
from megatron_webrl.launch import watchdog
from megatron_webrl.launch.first_node import role_line
from megatron_webrl.launch.node import Node, failure_of_attempt, record_failure
from megatron_webrl.launch.roles import role_command
from megatron_webrl.launch.run_folder import control_address_path, write_job
from megatron_webrl.launch.watchdog import HangDetector, StackDumper
from megatron_webrl.monitor.roles import CONTROL
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.types import is_infrastructure_failure
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE
from tests.job_control import connect, control_service, start
from tests.waiting import started, until

ROOT = Path(__file__).parents[2]
SLEEPS = [sys.executable, "-c", "import time; print('served', flush=True); time.sleep(600)"]
ROLE = """
import signal, subprocess, sys, threading, time
from pathlib import Path
from megatron_webrl.control import child_process, facts
from megatron_webrl.control.client import ControlClient

def endless_loop_of_this_test():
    while True:
        signal.pause()

child_process.register_dump_signal()
browser = subprocess.Popen(["sleep", "600"])  # or another program, which a signal would end
address, name, marks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
control = ControlClient(address, name)
control.start_heartbeat()
while marks and control.get_json("halt") is None:
    control.check_job()
    marks -= 1
    time.sleep(0.1)
endless_loop_of_this_test()
"""
FOR_EVER = "1000000"
SPANNING = ("cluster.nodes=2", "trainer.data_parallel=2", "rollout.pipeline_parallel=2")


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(child_process, "_DUMP_SECONDS", 1.0)
    monkeypatch.setattr(child_process, "FIRST_DELAY_SECONDS", 0.2)
    monkeypatch.setattr(Config, "hang_timeout_seconds", 2.0)


class Machine:
    """Roles of this machine, their node and watchdog, and its messages."""

    def __init__(self, config: Config, address: Path) -> None:
        self.config, self.address, self.control = config, address, connect(address, "launcher")
        self.messages: list[str] = []
        self.node = Node(self.config, 0, self.messages.append)
        self.node._control = self.control
        self.detector = HangDetector(config, place_processes(config), self.control)
        self.dumper = StackDumper(EventLog(config.run_folder), self.messages.append)

    def start(self, name: str, command: list[str] = SLEEPS) -> SupervisedProcess:
        return self.node.start(name, command, dict(os.environ), self.config.run_folder / f"{name}.log")

    def start_role(self, name: str, marks: str) -> SupervisedProcess:
        """Start a role with heartbeats that makes some progress, and then hangs."""
        role = self.start(name, [sys.executable, "-c", ROLE, str(self.address), name, marks])
        self.watch_until(lambda: self.progress(name), f"a mark of {name}")
        return role

    def progress(self, name: str) -> str:
        return watchdog.liveness_value(self.control.role_reports(), name, "progress")

    def watch_until(self, condition: Callable[[], object], what: str) -> None:
        """Look for roles that hang, and kill them, until the condition holds."""

        def holds() -> object:
            if request := self.detector.poll():
                self.messages.append(f"{request.reason}: dumping the stacks of all roles to their logs")
            self.dumper.poll(self.node.roles, lambda: self.control)
            return condition()

        until(holds, lambda: f"{what}: {self.messages}")

    def poll_until(self, condition: str, role: SupervisedProcess) -> None:
        """Handle failures until a role "runs" or "ended"."""

        def holds() -> bool:
            assert self.node.poll_failures() is None
            if condition == "runs":
                return role.restart_at is None and role.process.last_line() == "served"
            return not role.is_active

        until(holds, f"{role.name} {condition}")


def make_config(folder: Path, *settings: str) -> Config:
    config = parse_config(None, [f"run.directory={folder}", "run.name=here", *settings])
    config.run_folder.mkdir()
    write_job(config, place_processes(config))
    return config


@contextmanager
def machine(folder: Path, *settings: str) -> Iterator[Machine]:
    config = make_config(folder, *settings)
    with control_service(config.run_folder, config.run.heartbeat_timeout_seconds) as address:
        made = Machine(config, address)
        try:
            yield made
        finally:
            for role in made.node.roles:
                child_process.kill_process_group(role.process.pid, child_process.KILL_SECONDS)


def test_a_worker_beyond_its_budget_is_given_up_and_the_job_continues_down_to_the_least_engines(tmp_path: Path) -> None:
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
        [message] = here.messages[2:]
        assert message.startswith(f"{failure}; run.worker_restarts_per_hour=2 is used up: rollout-0 is given up")
        assert "1 of 2 engines" in message
        assert list(here.control.given_up_workers()) == ["rollout-0"]
        lines = [role_line(here.node, role, here.control.job_status()) for role in (first, second)]
        assert [(line.state, line.restarts) for line in lines] == [("failed", 2), ("starting", 0)]
        assert here.control.instance_has_ended("rollout-0.3")
        second.policy.max_restarts = 0
        second.process.kill()
        until(lambda: second.process.poll() is not None, "its end")
        outcome = here.node.poll_failures()
        assert outcome is not None
        assert outcome.startswith(f"failed: rollout-1 killed by SIGKILL; last log line: served (log: {second.log}); ")
        assert "0 of 2 engines are left, and rollout.min_engines=1" in outcome
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
        [message] = here.messages
        assert message.startswith(
            f"rollout-1 exited with code 1; last log line: ERROR a bad setting (log: {role.log}); "
        )
        assert "before it had served: rollout-1 is given up" in message


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


def test_a_role_that_survives_a_kill_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "KILL_SECONDS", 1.0)
    with machine(tmp_path, "rollout.engines=1") as here:
        role = here.start("rollout-0")
        with monkeypatch.context() as patched:
            patched.setattr(role.process, "kill", lambda: None)
            watchdog.request_stack_dump(here.config.run_folder, "it hangs", {"rollout-0": ("heartbeat", "")})
            here.dumper.poll(here.node.roles, lambda: here.control)
        outcome = here.node.poll_failures()
        assert outcome is not None
        assert outcome.startswith("failed: infrastructure: rollout-0 runs 1 s after SIGKILL")
        assert here.node.poll_failures() is None


def test_nothing_waits_for_a_control_service_that_has_exited_after_the_end_of_the_job(tmp_path: Path) -> None:
    address, thread = start(tmp_path)
    here = Machine(make_config(tmp_path), address)
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


# -- roles that hang --------------------------------------------------------------------------------------


def test_a_worker_that_hangs_but_sends_heartbeats_dumps_its_stacks_and_is_killed(tmp_path: Path) -> None:
    with machine(tmp_path, "rollout.engines=2") as here:
        here.start_role("rollout-0", FOR_EVER)
        role = here.start_role("rollout-1", "3")
        here.watch_until(lambda: role.process.poll() is not None, "the end of rollout-1")
        why = "rollout-1 made no progress for 2 s"
        assert here.messages == [f"{why}: dumping the stacks of all roles to their logs", f"killing rollout-1: {why}"]
        text = role.log.read_text()
        assert "endless_loop_of_this_test" in text
        assert "in _follow" in text  # of the other thread
        assert "in <module>" in here.node.roles[0].log.read_text()
        assert here.node.roles[0].process.poll() is None
        assert (role.failure_message() or "").startswith(
            f"rollout-1 killed by SIGKILL; last log line: ERROR killing rollout-1: {why}"
        )
        [event] = events.read_events(here.config.run_folder)
        assert (event.role, event.event) == ("rollout-1", events.KILLED)


def test_a_stopped_worker_and_a_follower_are_found_by_missing_heartbeats_and_restarted(tmp_path: Path) -> None:
    with machine(tmp_path, "run.heartbeat_timeout_seconds=2", "rollout.engines=1", *SPANNING) as here:
        roles = [here.start_role(name, FOR_EVER) for name in ("rollout-0", "rollout-0.follower-1")]
        pids = [role.process.pid for role in roles]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        here.watch_until(lambda: all(role.process.poll() is not None for role in roles), "the end of the roles")
        for role, pid in zip(roles, pids, strict=True):
            assert any(f"{role.name}: python ({pid}) does not show its stacks" in each for each in here.messages)
            assert "sent no heartbeat for 2 s" in (role.failure_message() or "")
            assert role.schedule_restart()
            here.control.clear_heartbeat(role.name)
            assert role.restart_if_due()
        for role in roles:
            here.watch_until(lambda: here.progress(role.name).startswith(f"{role.process.pid}:"), "it")  # noqa: B023
        end = time.monotonic() + 2.5  # longer than the limit: the new instance is judged by itself
        here.watch_until(lambda: time.monotonic() > end, "a look")
        assert [role.process.poll() for role in roles] == [None, None]


def test_the_first_trainer_rank_to_stop_is_killed_when_all_wait(tmp_path: Path) -> None:
    with machine(tmp_path, "trainer.data_parallel=3", "rollout.engines=1") as here:
        others = [here.start_role(f"trainer-{rank}", FOR_EVER) for rank in (0, 2)]
        culprit = here.start_role("trainer-1", "1")
        here.control.start_ticket_epoch(0, 0, {})
        silent = time.monotonic() + 2.5
        here.watch_until(lambda: time.monotonic() > silent, "more than the limit, for one rank")
        assert here.messages == []
        here.control.put_json("halt", True)
        here.watch_until(lambda: culprit.process.poll() is not None, "the end of trainer-1")
        assert [other.process.poll() for other in others] == [None, None]
        assert all("endless_loop_of_this_test" in other.log.read_text() for other in (*others, culprit))
        assert "no trainer rank for 2 s" in here.messages[0]


def test_a_role_that_recovers_is_not_killed_unless_in_any_case_and_a_user_can_request_stacks(tmp_path: Path) -> None:
    with machine(tmp_path, "rollout.engines=1") as here:
        role = here.start_role("rollout-0", FOR_EVER)
        watchdog.request_stack_dump(here.config.run_folder, "for a test", {"rollout-0": ("progress", "an older mark")})
        here.watch_until(lambda: "rollout-0 has recovered and is not killed" in here.messages, "the kill request")
        size = role.log.stat().st_size
        assert main(["node", "stacks", str(here.config.run_folder / "config.yaml")]) == 0
        here.watch_until(lambda: "in <module>" in role.log.read_text()[size:], "its stacks")
        assert role.process.poll() is None
        [browser] = psutil.Process(role.process.pid).children()
        assert browser.status() != psutil.STATUS_ZOMBIE
        watchdog.request_stack_dump(
            here.config.run_folder, "for a check", {"rollout-0": None}
        )  # whether it hangs or not
        here.watch_until(lambda: role.process.poll() == -signal.SIGKILL, "its end")
        assert "killing rollout-0: for a check" in here.messages


def test_no_request_of_an_earlier_launch_or_an_unreadable_folder_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    watchdog.request_stack_dump(folder, "long ago")
    messages: list[str] = []
    StackDumper(EventLog(folder), messages.append).poll([], lambda: pytest.fail("no role is to be killed"))
    assert messages == []
    assert watchdog.latest_request(tmp_path / ("x" * 300)) is None


def test_a_suspended_job_has_no_hang_when_it_continues(tmp_path: Path) -> None:
    config = make_config(tmp_path, "run.heartbeat_timeout_seconds=2", "rollout.engines=1")
    address = control_address_path(config)
    command = role_command(config.run_folder, "control", "--journal", str(config.run_folder / "control.journal"))
    with started(command, cwd=ROOT) as service, ThreadPoolExecutor(1) as pool:
        until(address.is_file, "the control service")
        worker = connect(address, "rollout-0")
        detector = HangDetector(config, place_processes(config), connect(address, "detector"))
        worker._connection.sync(make_fields=lambda: {"roles": {"rollout-0": (0.0, {"progress": "1:1"})}})
        service.send_signal(signal.SIGSTOP)  # and with it the whole job: nobody beats or looks
        time.sleep(2.5)  # longer than the limit, and than what the service takes for a pause
        first = pool.submit(detector.poll)  # a request that the service finds when it continues
        time.sleep(watchdog.POLL_SECONDS)
        service.send_signal(signal.SIGCONT)
        assert first.result(60) is None
        found: list[watchdog.KillRequest] = []
        until(lambda: found.extend(filter(None, [detector.poll()])) or found, "a role that is silent")  # type: ignore[func-returns-value]
        assert found[0].targets == {"rollout-0": ("heartbeat", "1")}


def test_the_limit_of_a_hang_is_above_the_waits_that_are_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    limits = {"": 900, "run.startup_timeout_seconds=2400": 3000, "weights.timeout_seconds=500": 1300}
    for setting, limit in limits.items():
        assert parse_config(None, [setting] if setting else []).hang_timeout_seconds == limit


# -- the limit on consecutive trainer failures, and the record of a failure that all nodes share ---------


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlClient]:
    with control_service(tmp_path) as address:
        yield connect(address, "node-0")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.directory, config.run.name, config.run.max_trainer_restarts = str(tmp_path), "here", 2
    (config.run_folder / "checkpoints").mkdir(parents=True)
    return config


def complete(config: Config, name: str) -> None:
    """Mark a checkpoint of that name as complete."""
    (config.run_folder / "checkpoints" / "latest").write_text(f"{name}\n")


def test_a_complete_checkpoint_resets_the_count_of_failures(control: ControlClient, config: Config) -> None:
    failures = [record_failure(control, config, attempt, "trainer-0", f"failure {attempt}")[0] for attempt in (0, 1)]
    complete(config, "version-000002")
    failures += [record_failure(control, config, each, "trainer-1", f"failure {each}")[0] for each in (2, 3, 4)]
    assert [failure.consecutive_failures for failure in failures] == [1, 2, 1, 2, 3]
    assert [failure.checkpoint for failure in failures] == ["", "", *["version-000002"] * 3]
    assert [failure.job_outcome(config) is None for failure in failures] == [True] * 4 + [False]
    outcome = failures[-1].job_outcome(config) or ""
    assert outcome.startswith("failed: the trainer failed 3 times in a row without a new checkpoint")
    assert "run.max_trainer_restarts=2" in outcome
    assert outcome.endswith("failure 4")


def test_a_run_folder_that_fails_hides_no_failure(
    control: ControlClient, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(config, "version-000002")
    record_failure(control, config, 0, "trainer-0", "failure 0")
    unreadable = config.run_folder / ("x" * 300)  # any look at it raises OSError
    monkeypatch.setattr(Config, "run_folder", property(lambda self: unreadable))
    failure, _ = record_failure(control, config, 1, "trainer-0", "failure 1")
    assert (failure.checkpoint, failure.consecutive_failures) == ("version-000002", 2)


def test_every_node_sees_the_failure_that_was_recorded_first(control: ControlClient, config: Config) -> None:
    assert failure_of_attempt(control, 0) is None
    first, is_first = record_failure(control, config, 0, "trainer-3", "killed")
    other, is_other = record_failure(control, config, 0, "trainer-0", "lost its peer")
    assert (is_first, is_other) == (True, False)
    assert other == first == failure_of_attempt(control, 0)
    assert failure_of_attempt(control, 1) is None
