"""The end of a job on one machine, with real processes in place of its roles."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from megatron_webrl.config.load import parse_config
from megatron_webrl.control import child_process
from megatron_webrl.launch import first_node, local
from megatron_webrl.launch.first_node import FirstNode
from megatron_webrl.launch.output import ConsoleOutput
from megatron_webrl.launch.roles import ProcessSpec
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import events, summary
from tests.job_control import connect, control_service

ENDS, FAILS, HANGS = ["true"], ["false"], ["sleep", "600"]


def made(folder: Path, out: io.StringIO) -> FirstNode:
    config = parse_config(None, [f"run.directory={folder}", "run.name=here", "model.platform=cpu"])
    return FirstNode(config, place_processes(config), ConsoleOutput(config, Console(file=out, width=200)))


@pytest.mark.parametrize(
    ("outcome", "trainer", "worker", "problem", "warning"),
    [
        ("finished", ENDS, HANGS, None, "rollout-0 did not exit within 1 s and is killed; its episodes are counted"),
        ("stopped", ENDS, FAILS, None, ""),
        ("finished", HANGS, HANGS, "rollout-0, trainer-0 did not exit within 1 s", ""),
        ("finished", FAILS, HANGS, "trainer-0 exited with code 1", "rollout-0 did not exit"),
        ("failed: x", ENDS, HANGS, "rollout-0 did not exit within 1 s", ""),
    ],
)
def test_a_worker_that_does_not_exit_cannot_fail_a_job_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, trainer: list[str], worker: list[str],
    problem: str | None, warning: str,
):  # fmt: skip
    for name in ("EXIT_GRACE_SECONDS", "FAILED_EXIT_GRACE_SECONDS"):
        monkeypatch.setattr(first_node, name, 0.6)
    out = io.StringIO()
    node = made(tmp_path, out)
    node.config.run_folder.mkdir()
    try:
        for name, command in (("control", HANGS), ("rollout-0", worker), ("trainer-0", trainer)):
            node.start(name, command, dict(os.environ), tmp_path / f"{name}.log")
        found = node._wait_for_exits(outcome)
        assert (found or "").startswith(problem or "")
        assert bool(found) == bool(problem)
        assert out.getvalue().startswith(warning)
        assert bool(out.getvalue()) == bool(warning)
    finally:
        for role in node.roles:
            child_process.kill_process_group(role.process.pid)


@pytest.mark.parametrize("trained", [False, True])
def test_an_interrupt_before_the_first_update_saves_a_warm_start(tmp_path: Path, trained: bool) -> None:
    out = io.StringIO()
    node = made(tmp_path, out)
    node.signals.notice_signal = signal.SIGINT
    with control_service(tmp_path) as address:
        node._control = control = connect(address, "host")
        if trained:
            control.put_json("demonstrations/trained", True)
        assert node._handle_signals() == ("" if trained else "interrupted")
        assert control.stop_requested()
    assert ("with a checkpoint" in out.getvalue()) == trained


ROLE = """
import json, os, signal, sys, time
from pathlib import Path
from megatron_webrl.control.client import ControlClient
folder, name, action = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
control = ControlClient(folder / "control.json", name)
control.start_heartbeat()
if name == "trainer-0":
    control.wait_for_key("worker", 60, "the worker")
    if action == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
    elif action == "damage":
        Path(os.environ["TMPDIR"], "control.journal").write_bytes(b"\\x9a\\n")
        os.kill(json.loads((folder / "control.json").read_text())["pid"], signal.SIGKILL)
    else:
        control.end_job(action)
control.put_json("worker", True)
while control.job_end() is None:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("action", "code", "outcome"),
    [
        ("finished", 0, "finished"),
        ("failed: x", 1, "failed: x"),
        ("interrupt", 130, "interrupted"),
        ("damage", 1, "the journal is damaged"),  # another start of the control service would read the same
    ],
)
def test_a_job_runs_on_this_machine_until_a_role_or_its_user_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, code: int, outcome: str
) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", "model.platform=cpu"])

    def stubs(*_: object) -> list[ProcessSpec]:
        command = (sys.executable, "-c", ROLE, str(config.run_folder))
        logs = config.run_folder / "logs"
        names = ("trainer-0", "trainer"), ("rollout-0", "rollout")
        return [ProcessSpec(name, role, (*command, name, action), {}, (), logs / name) for name, role in names]

    monkeypatch.setattr(first_node, "process_specs", stubs)
    before, children = signal.getsignal(signal.SIGINT), psutil.Process().children()
    assert local.run_here(config, Console(file=io.StringIO())) == code
    assert signal.getsignal(signal.SIGINT) is before
    assert outcome in summary.read_summary(config.run_folder)["outcome"]
    happened = [(each.role, each.event) for each in events.read_events(config.run_folder)]
    assert happened[0] == (events.JOB, events.STARTED)
    assert happened[-1] == (events.JOB, events.ENDED)
    assert {role for role, event in happened if event == events.STARTED} >= {"control", "trainer-0", "rollout-0"}
    assert psutil.Process().children() == children


def test_a_control_service_that_cannot_start_is_in_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    node = made(tmp_path, out)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(first_node, "LOCAL_PORT", taken.getsockname()[1])
        assert local.run_here(node.config, Console(file=out, width=1000)) == 1
    outcome = summary.read_summary(node.config.run_folder)["outcome"]
    assert outcome.startswith("failed: control exited with code 2; last log line: ")
    assert "Address already in use" in outcome
    assert f"state:      {outcome}; " in out.getvalue()
    assert [(event.role, event.event) for event in events.read_events(node.config.run_folder)] == [
        ("job", "started"), ("control", "started"), ("job", "ended"),
    ]  # fmt: skip
