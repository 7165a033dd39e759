"""Roles that hang are found, dump their stacks, and are killed: small processes with a real control service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import RestartPolicy, SupervisedProcess
from megatron_webrl.launch import watchdog
from megatron_webrl.launch.roles import role_command
from megatron_webrl.launch.run_folder import control_address_path, write_job
from megatron_webrl.launch.watchdog import HangDetector, StackDumper
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track.events import EventLog
from tests.job_control import connect, control_service
from tests.waiting import started, until

ROOT = Path(__file__).parents[2]
ROLE = """
import signal, sys, threading, time
from pathlib import Path
from megatron_webrl.control import child_process
from megatron_webrl.control.client import ControlClient

def endless_loop_of_this_test():
    while True:
        signal.pause()

child_process.register_dump_signal()
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


class Machine:
    """Roles on this machine, their watchdog, and its messages."""

    def __init__(self, config: Config, address: Path) -> None:
        self.config, self.messages, self.address = config, [], address  # type: ignore[var-annotated]
        self.control = connect(address, "launcher")
        self.detector = HangDetector(config, place_processes(config), self.control)
        self.dumper = StackDumper(EventLog(config.run_folder), self.messages.append)
        self.roles: list[SupervisedProcess] = []

    def start(self, name: str, marks: str) -> SupervisedProcess:
        command = [sys.executable, "-c", ROLE, str(self.address), name, marks]
        log = self.config.run_folder / f"{name}.log"
        policy = RestartPolicy(self.config.run.worker_restarts_per_hour)
        self.roles.append(SupervisedProcess(name, command, dict(os.environ), log, policy=policy).start())
        self.until(lambda: self.progress(name), f"a mark of {name}")
        return self.roles[-1]

    def poll(self) -> None:
        if request := self.detector.poll():
            self.messages.append(f"{request.reason}: dumping the stacks of all roles to their logs")
        self.dumper.poll(self.roles, lambda: self.control)

    def progress(self, name: str) -> str:
        return watchdog.liveness_value(self.control.role_reports(), name, "progress")

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}: {self.messages}"
            self.poll()
            time.sleep(0.05)


@contextmanager
def machine(folder: Path, *settings: str) -> Iterator[Machine]:
    config = parse_config(None, [f"run.directory={folder}", "run.name=here", *settings])
    config.run_folder.mkdir()
    write_job(config, place_processes(config))
    seconds = config.run.heartbeat_timeout_seconds
    with control_service(config.run_folder, heartbeat_timeout_seconds=seconds) as address:
        made = Machine(config, address)
        try:
            yield made
        finally:
            for role in made.roles:
                child_process.kill_process_group(role.process.pid)


def test_a_worker_that_hangs_but_sends_heartbeats_dumps_its_stacks_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "hang_timeout_seconds", 4.0)
    with machine(tmp_path, "rollout.engines=2") as here:
        here.start("rollout-0", FOR_EVER)
        role = here.start("rollout-1", "3")
        here.until(lambda: role.process.poll() is not None, "the end of rollout-1")
        why = "rollout-1 made no progress for 4 s"
        assert here.messages == [
            f"{why}: dumping the stacks of all roles to their logs",
            f"killing rollout-1: {why}",
        ]
        text = role.log.read_text()
        assert "endless_loop_of_this_test" in text
        assert "in _follow" in text  # of the other thread
        assert "in <module>" in here.roles[0].log.read_text()
        assert here.roles[0].process.poll() is None
        failure = role.failure_message()
        assert failure is not None
        assert failure.startswith(f"rollout-1 killed by SIGKILL; last log line: ERROR killing rollout-1: {why}")


SPANNING = ("cluster.nodes=2", "trainer.data_parallel=2", "rollout.pipeline_parallel=2")


@pytest.mark.parametrize(("name", "settings"), [("rollout-0", ()), ("rollout-0.follower-1", SPANNING)])
def test_a_stopped_worker_or_follower_is_found_by_missing_heartbeats_and_restarted(
    tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    with machine(tmp_path, "run.heartbeat_timeout_seconds=3", "rollout.engines=1", *settings) as here:
        role = here.start(name, FOR_EVER)
        first = role.process.pid
        os.kill(first, signal.SIGSTOP)
        here.until(lambda: role.process.poll() is not None, "the end of the role")
        assert (
            f"{name}: python ({first}) does not show its stacks: it is stopped, or waits for a device" in here.messages
        )
        failure = role.failure_message()
        assert failure is not None
        assert "sent no heartbeat for 3 s" in failure
        assert role.schedule_restart()
        here.control.clear_heartbeat(name)
        assert role.restart_if_due()
        here.until(lambda: here.progress(name).startswith(f"{role.process.pid}:"), "it")
        time.sleep(4)  # longer than the limit: the new instance is judged by itself
        here.until(lambda: True, "a look")
        assert role.process.poll() is None


def test_the_first_trainer_rank_to_stop_is_killed_when_all_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "hang_timeout_seconds", 4.0)
    with machine(tmp_path, "trainer.data_parallel=3", "rollout.engines=1") as here:
        others = [here.start(f"trainer-{rank}", FOR_EVER) for rank in (0, 2)]
        culprit = here.start("trainer-1", "1")
        here.control.start_ticket_epoch(0, 0, {})
        silent = time.monotonic() + 6
        here.until(lambda: time.monotonic() > silent, "more than the limit, for one rank")
        assert here.messages == []
        here.control.put_json("halt", True)
        here.until(lambda: culprit.process.poll() is not None, "the end of trainer-1")
        assert [other.process.poll() for other in others] == [None, None]
        assert all("endless_loop_of_this_test" in other.log.read_text() for other in (*others, culprit))
        assert "no trainer rank for 4 s" in here.messages[0]


def test_a_role_that_recovers_before_the_kill_is_not_killed(tmp_path: Path) -> None:
    with machine(tmp_path, "rollout.engines=1") as here:
        role = here.start("rollout-0", FOR_EVER)
        watchdog.request_stack_dump(here.config.run_folder, "for a test", {"rollout-0": ("progress", "an older mark")})
        here.until(lambda: "rollout-0 has recovered and is not killed" in here.messages, "the kill request")
        assert role.process.poll() is None


def test_a_kill_request_from_an_earlier_launch_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    watchdog.request_stack_dump(folder, "long ago")
    messages: list[str] = []
    dumper = watchdog.StackDumper(EventLog(folder), messages.append)
    dumper.poll([], lambda: pytest.fail("no role is to be killed"))
    assert messages == []


def test_a_folder_that_cannot_be_read_holds_no_request(tmp_path: Path) -> None:
    assert watchdog.latest_request(tmp_path / ("x" * 300)) is None


def test_a_suspended_job_has_no_hang_when_it_continues(tmp_path: Path) -> None:
    config = parse_config(
        None,
        [
            f"run.directory={tmp_path}",
            "run.heartbeat_timeout_seconds=2",
            "rollout.engines=1",
        ],
    )
    config.run_folder.mkdir(parents=True)
    write_job(config, place_processes(config))
    address = control_address_path(config)
    command = role_command(config.run_folder, "control", "--journal", str(config.run_folder / "control.journal"))
    with started(command, cwd=ROOT) as service, ThreadPoolExecutor(1) as pool:
        until(address.is_file, "the control service")
        worker = connect(address, "rollout-0")
        detector = HangDetector(config, place_processes(config), connect(address, "detector"))
        worker._connection.sync(make_fields=lambda: {"roles": {"rollout-0": (0.0, {"progress": "1:1"})}})
        service.send_signal(signal.SIGSTOP)  # and with it the whole job: nobody beats or looks
        time.sleep(6 * watchdog.POLL_SECONDS)
        first = pool.submit(detector.poll)  # a request that the service finds when it continues
        time.sleep(watchdog.POLL_SECONDS)
        service.send_signal(signal.SIGCONT)
        assert first.result(60) is None
        time.sleep(2 * watchdog.POLL_SECONDS)
        assert (detector.poll() or watchdog.KillRequest(0, "", {})).targets == {"rollout-0": ("heartbeat", "1")}


def test_browsers_and_other_programs_are_never_signalled(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    code = (
        "import subprocess; from megatron_webrl.control.child_process import register_dump_signal\n"
        "register_dump_signal()\n"
        "child = subprocess.Popen(['sleep', '100']); print(child.pid, flush=True); child.wait()"
    )
    with log.open("ab") as output:
        leader = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=output, text=True
        )
    assert leader.stdout is not None
    child = psutil.Process(int(leader.stdout.readline()))
    assert child_process.dump_stacks(leader.pid, log, "for a test") == []
    assert f"-- stacks of python ({leader.pid}): for a test --" in log.read_text()
    assert "subprocess.py" in log.read_text()
    assert child.is_running()
    child.kill()
    assert leader.wait(10) == 0


def test_a_user_can_request_stacks(tmp_path: Path) -> None:
    with machine(tmp_path, "rollout.engines=1") as here:
        role = here.start("rollout-0", "1")
        command = [
            sys.executable,
            "-m",
            "megatron_webrl",
            "node",
            "stacks",
            str(here.config.run_folder / "config.yaml"),
        ]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        here.until(lambda: "endless_loop_of_this_test" in role.log.read_text(), "its stacks")
        assert role.process.poll() is None


def test_the_limit_of_a_hang_is_above_the_waits_that_are_permitted() -> None:
    for settings, limit in (
        ([], 900),
        (["run.startup_timeout_seconds=2400"], 3000),
        (["weights.timeout_seconds=500"], 1300),
    ):
        assert parse_config(None, settings).hang_timeout_seconds == limit
