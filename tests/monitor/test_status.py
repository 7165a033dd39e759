"""The state of a run: from its files, and from a control service that is there, gone, hung, or another job's."""

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
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_webrl.cli import main
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.monitor import control_probe
from megatron_webrl.monitor.roles import RoleStatus, role_rows
from megatron_webrl.monitor.status import RunStatus, find_run, read_status, render_status
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from tests.job_control import claim_tickets, connect, control_service, tickets
from tests.monitor.runs import begin_job, make_run, train
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SERVER = (
    "import sys; from pathlib import Path; from megatron_webrl.control.server import serve;"
    "serve('127.0.0.1', 0, sys.argv[2], Path(sys.argv[1]), Path(sys.argv[1] + '.journal'))"
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


def by_name(report: RunStatus) -> dict[str, RoleStatus]:
    return {role.name: role for role in report.roles}


def states(report: RunStatus) -> dict[str, str]:
    return {role.name: role.state for role in report.roles}


# -- while it runs ------------------------------------------------------------------------------------


def test_a_running_job_is_reported_from_its_control_service(config: Config) -> None:
    journal = begin(config)
    train(config, 4)
    with control_service(config.run_folder) as address:
        trainer, worker = connect(address, "trainer-0"), connect(address, "rollout-0")
        trainer.report_status("update 5: waiting for groups, 3 of 8; dropped so far: none")
        trainer.start_ticket_epoch(0, 0, tickets(range(12)))
        assert len(claim_tickets(worker, 7)) == 7
        worker.close_ticket(2)
        worker.register_instance()
        line = "2026-11-22 17:06:42,838 rollout-0 INFO a.module: version 8 in place"
        journal.add("rollout-0", events.RESTARTED, f"rollout-0 killed by SIGKILL; last log line: {line} (log: x.log)")
        worker.report_status("version 8: 2 groups running")
        for control in (trainer, worker):
            control.start_heartbeat()
        report = read_status(config.run_folder)
        for control in (trainer, worker):
            control.close()
        assert (report.state, report.healthy, report.ended_at) == ("running", True, None)
        assert (report.version, report.target_updates) == (4, 10)
        assert report.expected_end == pytest.approx(report.time + 5.5 * 36.0, abs=18.5)
        assert report.tickets == {"claimed": 7, "limit": 12, "in_progress": 6}
        assert states(report) == {
            "control": "running", "trainer-0": "running", "trainer-1": "starting", "rollout-0": "running",
        }  # fmt: skip
        found = by_name(report)
        assert found["trainer-0"].status == "update 5: waiting for groups, 3 of 8; dropped so far: none"
        assert found["trainer-0"].heartbeat_age_seconds == pytest.approx(5, abs=5)
        assert found["rollout-0"].restarts == 1
        (row,) = next(table for title, table in report.tables().items() if "event" in title)["rows"]
        assert row[2:] == ("rollout-0", "restarted", "killed by SIGKILL; last log line: version 8 in place")
        assert json.loads(json.dumps(asdict(report)))["tickets"]["in_progress"] == 6
        assert found["rollout-0"].status == "version 8: 2 groups running"
        connect(address, "test").clear_heartbeat("rollout-0")
        again = by_name(read_status(config.run_folder))["rollout-0"]
        trainer.end_job("stopped")
        ending = read_status(config.run_folder)
    assert (again.state, again.status, again.restarts) == ("starting", "", 1)  # not of its earlier instance
    assert (ending.state, ending.reason, ending.healthy) == ("ending", "outcome: stopped", True)


def test_a_silent_role_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path, "run.heartbeat_timeout_seconds=2")
    begin(config)
    with control_service(config.run_folder) as address:
        trainer, worker = connect(address, "trainer-0"), connect(address, "rollout-0")
        send_heartbeat(trainer)
        until(lambda: trainer.role_reports()["trainer-0"]["silent_seconds"] > 2, "its silence")
        send_heartbeat(worker)
        found = by_name(read_status(config.run_folder))
    assert [found[name].state for name in ("control", "trainer-0", "trainer-1", "rollout-0")] == [
        "running", "silent", "starting", "running",
    ]  # fmt: skip
    assert 2 < (found["trainer-0"].heartbeat_age_seconds or 0) < 60
    assert (found["rollout-0"].heartbeat_age_seconds or 0) < 2
    assert found["trainer-1"].heartbeat_age_seconds is None


def test_an_end_is_reported_before_the_processes_exit(config: Config) -> None:
    with control_service(config.run_folder) as address:
        control = connect(address, "trainer-0")
        control.request_stop()
        report = read_status(config.run_folder)
        assert (report.state, report.reason) == ("starting", "stop requested")
        begin(config)
        control.end_job("failed: trainer-1: RuntimeError: no memory")
        report = read_status(config.run_folder)
    assert (report.state, report.reason, report.healthy) == ("failed", "trainer-1: RuntimeError: no memory", False)
    failed = [(role.name, role.status) for role in report.roles if role.state == "failed"]
    assert failed == [("trainer-1", "RuntimeError: no memory")]


# -- when nothing answers -----------------------------------------------------------------------------


def test_a_service_that_does_not_answer_is_told_from_one_of_another_job_and_a_killed_one(config: Config) -> None:
    begin(config)
    train(config, 4)
    path = config.run_folder / "control.json"
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(path), "a-ring"])
    until(path.is_file, "the control service")
    assert isinstance(control_probe.query(path), dict)
    own = path.read_text()
    path.write_text(json.dumps(json.loads(own) | {"job_id": "mine", "token": "my own"}))
    report = read_status(config.run_folder)
    assert report.state == "silent"
    assert "does not respond (another job answers)" in report.reason
    path.write_text(own)

    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert "does not respond (no answer within 0.8 s)" in read_status(config.run_folder).reason
    assert time.monotonic() - began < 10
    process.send_signal(signal.SIGCONT)
    assert isinstance(control_probe.query(path, seconds=60.0), dict)

    process.kill()
    process.wait()
    began = time.monotonic()
    assert "does not respond (Connection refused)" in str(control_probe.query(path))
    assert time.monotonic() - began < 1.5
    old = time.time() - 600
    for log in [*config.run_folder.rglob("*.log"), *config.run_folder.glob("*.*")]:
        os.utime(log, (old, old))
    os.utime(config.run_folder / "logs" / "trainer-1.log", (old + 60, old + 60))
    report = read_status(config.run_folder)
    assert (report.state, report.healthy, report.ended_at) == ("silent", False, None)
    assert "(9 min" in report.lines["state"]
    assert f"it can be reached only from the job's machine ({os.uname().nodename})" in report.reason
    assert set(states(report).values()) == {"unknown"}
    assert {role.status for role in report.roles} >= {"of trainer-0", "of rollout-0"}  # the last lines of their logs
    assert (report.version, report.expected_end) == (4, None)


def test_a_job_in_preparation_is_starting_for_a_limited_time(config: Config) -> None:
    report = read_status(config.run_folder)
    assert (report.state, report.reason) == ("starting", "the control service has not started yet")
    assert set(states(report).values()) == {"not started"}
    old = time.time() - 2 * config.run.startup_timeout_seconds
    os.utime(config.run_folder / "config.yaml", (old, old))
    report = read_status(config.run_folder)
    assert (report.state, report.reason, report.healthy) == ("silent", "the job has not started", False)


def send_heartbeat(control: ControlClient, **report: str) -> None:
    control._connection.sync(make_fields=lambda: {"roles": {control.role: (0.0, report)}})


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
        report = read_status(config.run_folder)
        assert not select.select([other], [], [], 0)[0]
    assert (report.state, report.reason, report.healthy) == ("finished", "", True)
    assert report.ended_at == pytest.approx(time.time(), abs=60)
    assert report.lines["episodes"].endswith("+ 24 waiting = 330: matches")
    assert set(states(report).values()) == {"ended"}
    assert report.lines["summary"] == str(config.run_folder / "summary.json")


def test_every_outcome_is_a_state_also_of_a_renamed_run(config: Config) -> None:
    journal = begin(config)
    failure = "trainer-1 exited with code 1; last log line: ERROR out of memory"
    journal.add("trainer-1", events.FAILED, f"{failure} (log: x.log)", config.run_folder / "logs" / "trainer-1.log")
    folder = config.run_folder / "checkpoints"
    folder.mkdir()
    (folder / "latest").write_text("version-000004")
    train(config, 6, **{"checkpoint/failures": 2.0})
    moved = shutil.move(config.run_folder, config.run_folder.with_name("made.1"))
    for outcome, state, reason, healthy in (
        ("stopped", "stopped", "", True),
        ("interrupted by SIGTERM", "interrupted", "by SIGTERM", False),
        (f"failed: {failure}", "failed", failure, False),
    ):
        summary.ensure_written(moved, outcome)
        report = read_status(moved)
        assert (report.state, report.reason, report.healthy) == (state, reason, healthy)
    assert states(report) == {"control": "ended", "trainer-0": "ended", "trainer-1": "failed", "rollout-0": "ended"}
    assert by_name(report)["trainer-1"].status == failure.removeprefix("trainer-1 ")
    assert report.lines["summary"] == f"{moved}/summary.json"
    assert report.lines["checkpoint"].startswith(f"{moved}/checkpoints/version-000004, 20")
    assert report.lines["checkpoint"].endswith(", 2 failures")


def test_processes_are_those_of_the_job_and_of_its_nodes(tmp_path: Path) -> None:
    evaluation = make_run(tmp_path, name="evaluation")
    journal = EventLog(evaluation.run_folder)
    for name in (events.JOB, "control", "rollout-0"):
        journal.add(name, events.STARTED)
    summary.ensure_written(evaluation.run_folder, "finished")
    assert set(states(read_status(evaluation.run_folder))) == {"control", "rollout-0"}  # no trainer
    config = make_run(tmp_path, config=str(ROOT / "configs" / "8b_4node.yaml"))
    EventLog(config.run_folder).add(events.JOB, events.STARTED)
    EventLog(config.run_folder, 2).add("trainer-8", events.STARTED)  # of the four ranks of node 2
    found = by_name(read_status(config.run_folder))
    assert len(found) == 1 + 16 + 16 - 3
    assert (found["trainer-8"].node, found["rollout-9"].node) == (2, 2)


# -- which run ----------------------------------------------------------------------------------------


def test_a_run_is_found_by_folder_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert find_run("made") == Path("runs/made")
    assert find_run(str(made.run_folder)) == made.run_folder
    assert read_status(find_run("made")).lines["run"] == "made, runs/made"
    (tmp_path / "runs" / "empty").mkdir()
    for run, message in (
        ("mada", r"RUN=mada is neither the folder of a run nor the name of one in runs/; there are made$"),
        ("runs/empty", r"RUN=runs/empty has no config.yaml"),
        ("runs/made/config.yaml", r"is a file; name the folder of a run, such as runs/made"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_run(run)


# -- what a person reads ------------------------------------------------------------------------------


def cluster() -> list[RoleStatus]:
    """The processes of 32 nodes with 256 GPUs: one worker was restarted, one rank is silent."""
    training, rollout = "update 7: training on 512 groups", "version 6: {} groups running, {} episodes done"
    ranks = [RoleStatus(f"trainer-{n}", "running", training, 0, n // 4, 0.5) for n in range(128)]
    workers = [RoleStatus(f"rollout-{n}", "running", rollout.format(n % 3 + 2, 100 + n), 0, n // 4) for n in range(128)]
    parts = [RoleStatus(f"rollout-{n}.follower-1", "running", f"serving rollout-{n}", 0, n + 16) for n in range(16)]
    ranks[0] = replace(ranks[0], status="update 8: waiting for groups, 3 of 512; dropped so far: stale 6")
    ranks[77] = replace(ranks[77], state="silent", heartbeat_age_seconds=31.25)
    workers[40] = replace(workers[40], restarts=1)
    return [RoleStatus("control", "running", ""), *ranks, *workers, *parts]


def test_similar_processes_share_a_row_and_others_have_their_own() -> None:
    rows = {row[0]: row[1:] for row in role_rows(cluster())}
    assert len(rows) == 7
    assert rows["trainer 77"] == ("19", "silent", "31.2", "", "update 7: training on 512 groups")
    assert rows["trainer 1-76,78-127"][:3] == ("0-31", "running", "0.5")
    assert rows["rollout 40"][3] == "1"
    assert rows["rollout 0-39,41-127"][4] == "version 6: 2-4 groups running, 100-227 episodes done"
    assert rows["rollout follower-1 0-15"] == ("16-31", "running", "", "", "serving rollout-0-15")


def test_a_status_of_32_nodes_fits_a_terminal(tmp_path: Path) -> None:
    made = make_run(tmp_path, config=str(ROOT / "configs" / "8b_32node.yaml"))
    begin_job(made, 3600)
    train(made, 7)
    journal = EventLog(made.run_folder, 10)
    for number in range(20):
        reason = f"rollout-40 killed by SIGKILL; last log line: number {number} (log: here.log)"
        journal.add("rollout-40", events.RESTARTED, reason, Path("here.log"))
    for width in (80, 200):
        out = StringIO()
        Console(file=out, width=width).print(render_status(replace(read_status(made.run_folder), roles=cluster())))
        assert max(map(len, out.getvalue().splitlines())) <= width
        assert "…" not in out.getvalue()
        whole = " ".join(out.getvalue().split())
        for text in ("32 nodes", "7 of ", "trainer 77", "100.0 updates/h", "last 8 events of 20"):
            assert text in whole
    assert "last log line: number 19 [here.log]" in whole
    assert "number 11" not in whole


def test_the_exit_code_tells_a_healthy_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path / "runs")
    summary.ensure_written(made.run_folder, "finished")
    assert main(["status", "made"]) == 0
    assert "finished; 20" in capsys.readouterr().out
    summary.ensure_written(made.run_folder, "failed: trainer-0: ValueError")
    assert main(["status", "made", "--json"]) == 1
    assert '"reason": "trainer-0: ValueError"' in capsys.readouterr().out
    assert main(["status", "other"]) == 2
