"""What is said of a run: from its files, and from a control service that is there, gone, hung, or another job's."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.address import ControlAddress
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.run_folder import config_path
from megatron_webrl.monitor.status import control_probe
from megatron_webrl.monitor.status.control_probe import ControlStatus
from megatron_webrl.monitor.status.report import RunReport, build_report, find_run
from megatron_webrl.monitor.status.role_status import RoleState
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from tests.job_control import connect, control_service, tickets
from tests.monitor.status.made_runs import begin_job, make_run, train
from tests.waiting import until

ROOT = Path(__file__).parents[3]
SERVER = (
    "import sys; from pathlib import Path; from megatron_webrl.control.server import serve;"
    "serve('127.0.0.1', 0, sys.argv[2], Path(sys.argv[1]), Path(sys.argv[1] + '.journal'), seconds=120)"
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_run(tmp_path, "trainer.data_parallel=2", "trainer.updates=10")


def begin(config: Config) -> EventLog:
    begin_job(config, 3600)
    journal = EventLog(config.run_folder)
    for name in ("control", "rollout-0", "trainer-0", "trainer-1"):
        log = config.run_folder / "logs" / f"{name}.log"
        log.write_text(f"of {name}\n")
        journal.add(name, events.STARTED, log=log)
    return journal


def by_name(report: RunReport) -> dict[str, RoleState]:
    return {role.name: role for role in report.roles}


def states(report: RunReport) -> dict[str, str]:
    return {role.name: role.state for role in report.roles}


# -- while it runs ------------------------------------------------------------------------------------


def test_a_running_job_is_reported_from_its_control_service(config: Config) -> None:
    journal = begin(config)
    train(config, 4)
    with control_service(config.run_folder) as address:
        trainer, worker = connect(address, "trainer-0"), connect(address, "rollout-0")
        trainer.report_status("update 5: waiting for groups, 3 of 8; dropped so far: none")
        trainer.start_ticket_epoch(0, 0, tickets(range(12)))
        assert len(worker.claim_tickets(7)) == 7
        worker.close_ticket(2)
        worker.register_instance()
        line = "2026-11-22 17:06:42,838 rollout-0 INFO a.module: version 8 in place"
        journal.add("rollout-0", events.RESTARTED, f"rollout-0 killed by SIGKILL; last log line: {line} (log: x.log)")
        for control in (trainer, worker):
            control.start_heartbeat()
        report = build_report(config.run_folder)
        for control in (trainer, worker):
            control.close()
        assert (report.state, report.healthy, report.ended_at) == ("running", True, None)
        assert (report.version, report.target_updates) == (4, 10)
        assert report.control_address == f"{worker.host}:{worker.port}"
        assert report.expected_end == pytest.approx(report.time + 5.5 * 36.0, abs=18.5)
        assert report.tickets == control_probe.TicketCounts(claimed=7, limit=12, in_progress=6)
        assert states(report) == {
            "control": "running", "trainer-0": "running", "trainer-1": "starting", "rollout-0": "running",
        }  # fmt: skip
        found = by_name(report)
        assert found["trainer-0"].status_line == "update 5: waiting for groups, 3 of 8; dropped so far: none"
        beat = found["trainer-0"].heartbeat_age_seconds
        assert beat is not None
        assert beat < 10
        assert [restart.reason for restart in found["rollout-0"].restarts] == [
            "killed by SIGKILL; last log line: version 8 in place"
        ]
        assert found["trainer-1"].log == str(config.run_folder / "logs" / "trainer-1.log")
        assert json.loads(json.dumps(report.to_json()))["tickets"]["in_progress"] == 6


def test_a_restarted_role_does_not_show_the_status_of_its_earlier_instance(config: Config) -> None:
    journal = begin(config)
    with control_service(config.run_folder) as address:
        worker = connect(address, "rollout-0")
        send_heartbeat(worker, status="version 8: 2 groups running")
        assert by_name(build_report(config.run_folder))["rollout-0"].status_line == "version 8: 2 groups running"
        worker.clear_heartbeat("rollout-0")
        journal.add("rollout-0", events.RESTARTED, "rollout-0 exited with code 1")
        again = by_name(build_report(config.run_folder))["rollout-0"]
    assert (again.state, again.status_line, len(again.restarts)) == ("starting", "", 1)


def test_a_probe_leaves_no_trace_in_the_job(config: Config) -> None:
    with control_service(config.run_folder) as address:
        control = connect(address, "test")
        control.start_ticket_epoch(0, 0, tickets(range(3)))
        reports, journal = control.role_reports(), (config.run_folder / "control.journal").read_bytes()
        assert journal
        assert build_report(config.run_folder).state == "running"
        assert (config.run_folder / "control.journal").read_bytes() == journal
        assert control.role_reports() == reports == {}


def test_a_silent_role_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path, "run.heartbeat_timeout_seconds=5")
    begin(config)
    with control_service(config.run_folder) as address:
        trainer, worker = connect(address, "trainer-0"), connect(address, "rollout-0")
        send_heartbeat(trainer)
        until(lambda: trainer.role_reports()["trainer-0"]["silent_seconds"] > 5, "its silence")
        send_heartbeat(worker)
        report = build_report(config.run_folder)
    found = by_name(report)
    assert states(report) == {
        "control": "running", "trainer-0": "silent", "trainer-1": "starting", "rollout-0": "running",
    }  # fmt: skip
    ages = [found[name].heartbeat_age_seconds for name in ("trainer-0", "rollout-0", "trainer-1")]
    assert 5 < (ages[0] or 0) < 60
    assert ages[1] is not None
    assert ages[1] < 5
    assert ages[2] is None


def test_the_end_of_a_job_is_reported_before_its_processes_exit(config: Config) -> None:
    begin(config)
    with control_service(config.run_folder) as address:
        connect(address, "trainer-0").end_job("failed: trainer-1: RuntimeError: no more memory")
        report = build_report(config.run_folder)
    assert (report.state, report.reason) == ("failed", "trainer-1: RuntimeError: no more memory")
    assert not report.healthy
    failed = next(role for role in report.roles if role.state == "failed")
    assert (failed.name, failed.status_line) == ("trainer-1", "RuntimeError: no more memory")


def test_a_requested_stop_is_reported(config: Config) -> None:
    with control_service(config.run_folder) as address:
        control = connect(address, "test")
        control.request_stop()
        report = build_report(config.run_folder)
        assert (report.state, report.reason) == ("starting", "stop requested")
        control.end_job("stopped")
        report = build_report(config.run_folder)
        assert (report.state, report.reason, report.healthy) == ("ending", "outcome: stopped", True)


# -- when nothing answers -----------------------------------------------------------------------------


def test_a_killed_job_is_silent(config: Config) -> None:
    begin(config)
    train(config, 4)
    process = serve(config.run_folder, "a-ring")
    process.kill()
    process.wait()
    old = time.time() - 600
    for path in [*config.run_folder.rglob("*.log"), *config.run_folder.glob("*.*")]:
        os.utime(path, (old, old))
    os.utime(config.run_folder / "logs" / "trainer-1.log", (old + 60, old + 60))
    report = build_report(config.run_folder)
    assert (report.state, report.healthy, report.ended_at) == ("silent", False, None)
    assert report.last_activity_at == pytest.approx(old + 60)
    assert "does not respond (Connection refused)" in report.reason
    assert f"it can be reached only from the job's machine ({os.uname().nodename})" in report.reason
    assert set(states(report).values()) == {"unknown"}
    assert {role.status_line for role in report.roles} >= {
        "of trainer-0",
        "of rollout-0",
    }  # the last lines of their logs
    assert report.version == 4
    assert report.expected_end is None


def test_an_ended_control_service_and_a_host_that_is_gone_are_known_at_once(config: Config) -> None:
    begin(config)
    process = serve(config.run_folder, "a-ring")
    process.kill()
    process.wait()
    path = config.run_folder / "control.json"
    began = time.monotonic()
    assert "does not respond (Connection refused)" in str(control_probe.query(path))
    assert time.monotonic() - began < 1.5
    with socket.socket() as full:  # a listener with no room drops further connections, as a lost host does
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        ControlAddress(*full.getsockname(), 1, "a-ring", "token").write(path)
        began = time.monotonic()
        assert "does not respond (no answer within 0.3 s)" in str(control_probe.query(path))
        assert time.monotonic() - began < 1.5
        for each in waiting:
            each.close()


def test_the_wait_for_a_hung_control_service_is_limited(config: Config) -> None:
    begin(config)
    process = serve(config.run_folder, "a-ring")
    path = config.run_folder / "control.json"
    address = ControlAddress.read(path)
    assert address is not None
    assert isinstance(control_probe.query(path), ControlStatus)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    expected = f"127.0.0.1:{address.port} does not respond (no answer within 2 s)"
    assert control_probe.query(path, seconds=2.0) == expected
    assert time.monotonic() - began < 10
    assert "no answer within 0.8 s" in build_report(config.run_folder).reason
    process.send_signal(signal.SIGCONT)
    assert isinstance(control_probe.query(path, seconds=60.0), ControlStatus)
    process.kill()
    process.wait()


def test_the_control_service_of_another_job_is_recognised(config: Config) -> None:
    process = serve(config.run_folder, "another")
    path = config.run_folder / "control.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"job_id": "mine", "token": "my own"}))
    report = build_report(config.run_folder)
    process.kill()
    process.wait()
    assert report.state == "silent"
    assert "does not respond (another job answers)" in report.reason


def test_a_job_in_preparation_is_starting_for_a_limited_time(config: Config) -> None:
    report = build_report(config.run_folder)
    assert (report.state, report.reason) == ("starting", "the control service has not started yet")
    assert set(states(report).values()) == {"not started"}
    old = time.time() - 2 * config.run.startup_timeout_seconds
    os.utime(config.run_folder / "config.yaml", (old, old))
    report = build_report(config.run_folder)
    assert (report.state, report.reason, report.healthy) == ("silent", "the job has not started", False)


def send_heartbeat(control: ControlClient, **report: str) -> None:
    control._connection.sync(make_fields=lambda: {"roles": {control.role: (0.0, report)}})


def serve(folder: Path, ring: str) -> subprocess.Popen[bytes]:
    path = folder / "control.json"
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(path), ring])
    until(path.is_file, "the control service")
    return process


# -- after the end ------------------------------------------------------------------------------------


def test_an_ended_run_is_reported_without_a_query(config: Config) -> None:
    journal = begin(config)
    train(config, 10)
    accounting = {"finished": 330, "trained": 300, "dropped": {"stale": 6}, "waiting": 24, "rolled_back": 0}
    accounting |= {"matches": True}
    summary.write_summary(config.run_folder, "finished", accounting | {"tokens": {}})
    journal.add(events.JOB, events.ENDED, "finished")
    with socket.create_server(("127.0.0.1", 0)) as other:  # at the address of its control service
        ControlAddress(*other.getsockname(), os.getpid(), "a-ring", "token").write(config.run_folder / "control.json")
        report = build_report(config.run_folder)
        assert not select.select([other], [], [], 0)[0]
    assert (report.state, report.reason, report.healthy) == ("finished", "", True)
    assert report.ended_at == pytest.approx(time.time(), abs=60)
    assert report.episodes is not None
    assert (report.episodes.waiting, report.episodes.matches) == (24, True)
    assert set(states(report).values()) == {"ended"}
    assert report.paths["summary"] == str(config.run_folder / "summary.json")


@pytest.mark.parametrize(
    ("outcome", "state", "why", "well"),
    [
        ("stopped", "stopped", "", True),
        ("interrupted", "interrupted", "", False),
        ("interrupted by SIGTERM", "interrupted", "by SIGTERM", False),
        ("failed: trainer-1 killed by SIGKILL", "failed", "trainer-1 killed by SIGKILL", False),
        ("failed", "failed", "", False),
    ],
)
def test_every_outcome_is_a_state(config: Config, outcome: str, state: str, why: str, well: bool) -> None:
    summary.ensure_written(config.run_folder, outcome)
    report = build_report(config.run_folder)
    assert (report.state, report.reason, report.healthy) == (state, why, well)


def test_a_failed_role_shows_its_reason_after_the_end(config: Config) -> None:
    journal = begin(config)
    failure = "trainer-1 exited with code 1; last log line: ERROR out of memory (log: somewhere/trainer-1.log)"
    journal.add("trainer-1", events.FAILED, failure, config.run_folder / "logs" / "trainer-1.log")
    summary.ensure_written(config.run_folder, f"failed: {failure}")
    report = build_report(config.run_folder)
    assert states(report) == {"control": "ended", "trainer-0": "ended", "trainer-1": "failed", "rollout-0": "ended"}
    failed = next(role for role in report.roles if role.state == "failed")
    assert failed.status_line == "exited with code 1; last log line: ERROR out of memory"


def test_the_newest_checkpoint_and_failures_are_reported(config: Config) -> None:
    folder = config.run_folder / "checkpoints"
    (folder / ".staging-000001-ab" / "000006").mkdir(parents=True)
    (folder / "latest").write_text("version-000004")
    train(config, 6, **{"checkpoint/failures": 2.0})
    found = build_report(config.run_folder).checkpoints
    assert found.latest == str(folder / "version-000004")
    assert found.completed_at == pytest.approx(time.time(), abs=60)
    assert (found.failures, found.writing) == (2, True)


def test_the_ring_of_this_machine_is_reported(config: Config) -> None:
    from megatron_webrl.ring.ring import Ring

    name = f"webrl-status-{os.getpid()}"
    ring = Ring.create_or_attach(name, 2**20, "job")
    try:
        ring.write([bytes(2**19)], 1.0)
        process = serve(config.run_folder, name)
        (found,) = build_report(config.run_folder).rings
        process.kill()
        process.wait()
        assert (found.node, found.capacity_mib, found.records) == (0, 1.0, 1)
        assert found.used_mib == pytest.approx(0.5)
    finally:
        ring.unlink()
        ring.close()


def test_an_evaluation_has_no_trainer(config: Config) -> None:
    journal = EventLog(config.run_folder)
    journal.add(events.JOB, events.STARTED)
    for name in ("control", "rollout-0"):
        journal.add(name, events.STARTED)
    summary.ensure_written(config.run_folder, "finished")
    assert set(states(build_report(config.run_folder))) == {"control", "rollout-0"}


def test_a_step_that_has_not_started_is_shown_with_those_that_have(tmp_path: Path) -> None:
    config = make_run(tmp_path, config=str(ROOT / "configs" / "8b_4node.yaml"))
    EventLog(config.run_folder).add(events.JOB, events.STARTED)
    EventLog(config.run_folder, 2).add("trainer-8", events.STARTED)  # of the four ranks of node 2
    report = build_report(config.run_folder)
    found = by_name(report)
    assert len(found) == 1 + 16 + 16 - 3
    assert found["trainer-8"].node == 2
    assert found["rollout-9"].node == 2


# -- which run ----------------------------------------------------------------------------------------


def test_a_run_is_found_by_folder_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert find_run("made") == Path("runs/made")
    assert find_run(str(made.run_folder)) == made.run_folder
    assert build_report(find_run("made")).name == "made"
    (tmp_path / "runs" / "empty").mkdir()
    for run, message in (
        ("mada", r"RUN=mada is neither the folder of a run nor the name of one in runs/; there are made$"),
        ("runs/empty", r"RUN=runs/empty has no config.yaml"),
        ("runs/made/config.yaml", r"is a file; name the folder of a run, such as runs/made"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_run(run)


def test_a_renamed_run_is_read_from_its_folder(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    begin(made)
    summary.ensure_written(made.run_folder, "stopped")
    shutil.move(made.run_folder, tmp_path / "made.1")
    report = build_report(tmp_path / "made.1")
    assert report.state == "stopped"
    assert report.paths["summary"] == str(tmp_path / "made.1" / "summary.json")
    assert {Path(role.log).parent for role in report.roles} == {tmp_path / "made.1" / "logs"}
    assert config_path(made).parent != tmp_path / "made.1"
