"""The end of a job on one machine, with real processes in place of its roles."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from megatron_webrl.config.load import parse_config
from megatron_webrl.launch import local_launcher
from megatron_webrl.launch.local_launcher import LocalLauncher
from megatron_webrl.util import child_process
from tests.job_control import connect, control_service

ENDS, FAILS, HANGS = ["true"], ["false"], ["sleep", "600"]


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
        monkeypatch.setattr(local_launcher, name, 1.0)
    out = io.StringIO()
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", "model.platform=cpu"])
    config.run_folder.mkdir()
    launcher = LocalLauncher(config, Console(file=out, width=200))
    supervisor = launcher.supervisor
    try:
        for name, command in (("control", HANGS), ("rollout-0", worker), ("trainer-0", trainer)):
            supervisor.start(name, command, dict(os.environ), tmp_path / f"{name}.log")
        found = launcher._wait_for_exits(outcome)
        assert (found or "").startswith(problem or "")
        assert bool(found) == bool(problem)
        assert out.getvalue().startswith(warning)
        assert bool(out.getvalue()) == bool(warning)
    finally:
        for role in supervisor.roles:
            child_process.kill_process_group(role.process.pid)


@pytest.mark.parametrize("trained", [False, True])
def test_an_interrupt_before_the_first_update_saves_a_warm_start(tmp_path: Path, trained: bool) -> None:
    out = io.StringIO()
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", "model.platform=cpu"])
    launcher = LocalLauncher(config, Console(file=out, width=200), interrupts=1)
    with control_service(tmp_path) as address:
        control = connect(address, "launcher")
        if trained:
            control.put_json("demonstrations/trained", True)
        assert launcher._outcome(control) == (None if trained else "interrupted")
        assert control.stop_requested()
    assert ("with a checkpoint" in out.getvalue()) == trained


@pytest.mark.parametrize(
    ("overrides", "gpu", "problem", "expected"),
    [
        ((), True, "", "cluster.gpus_per_node=0: trainer and engines take this machine's first GPU"),
        ((), True, "torch is built for CPUs", ""),
        ((), False, "", ""),
        (("evaluation.only=true",), True, "", ""),
        (("model.platform=cuda",), True, "", ""),
        (("cluster.gpus_per_node=1",), True, "", ""),
        (("cluster.gpus_per_node=1",), False, "", "no GPU on this machine: all roles compute on its cores"),
    ],
)
def test_a_job_says_which_devices_it_takes_unasked(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], gpu: bool, problem: str, expected: str
) -> None:
    monkeypatch.setattr(local_launcher, "has_gpu", lambda: gpu)
    monkeypatch.setattr(local_launcher.cuda_driver, "find_cuda_problem", lambda: problem)
    warning = local_launcher._device_warning(parse_config(None, list(overrides)))
    assert warning.startswith(expected)
    assert bool(warning) == bool(expected)
