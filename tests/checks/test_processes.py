"""Functions in processes of their own: results, errors, deaths and limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_webrl.checks import processes
from megatron_webrl.checks.processes import run_processes
from tests.waiting import until


def work(argument: Any) -> Iterator[Any]:
    """Yield rank and argument, then fail as the argument says."""
    yield os.environ["RANK"], os.environ["WORLD_SIZE"], argument
    if argument == "raise":
        raise ValueError("of the\nfunction")
    if argument == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if argument.startswith("/"):
        Path(argument).write_text(f"{os.getpid()} {tempfile.gettempdir()}\n")
        time.sleep(600)
    if argument == "sleep":
        yield psutil.Popen(["sleep", "600"]).pid
        time.sleep(600)


def run(*arguments: str, seconds: float = 30.0) -> list[processes.Outcome]:
    return run_processes(f"{__name__}:work", arguments, seconds)


def test_an_error_and_a_death_are_lines_earlier_results_stay_and_children_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    found = run("raise", "die", "sleep", "return")
    assert [each.error for each in found] == [
        "ValueError: of the function", "its process killed by SIGKILL", "it did not finish within 30 s", "",
    ]  # fmt: skip
    assert [len(each.results) for each in found] == [1, 1, 2, 1]
    assert found[3].results == [("3", "4", "return")]
    assert "ValueError: of the" in found[0].log
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(found[2].results[1]).status() == psutil.STATUS_ZOMBIE  # killed, and not yet reaped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pid"
    script = "from megatron_webrl.checks.processes import run_processes; run_processes({!r}, [{!r}], 60)"
    started = subprocess.Popen([sys.executable, "-c", script.format(f"{__name__}:work", str(file))])
    try:
        until(lambda: file.is_file() and file.read_text().endswith("\n"), "the process of the check")
        pid, folder = file.read_text().split()
        started.send_signal(number)
        assert started.wait(30) == (143 if number == signal.SIGTERM else -number)
        until(lambda: not psutil.pid_exists(int(pid)), "the process of the check to end")
    finally:
        started.kill()
    assert not Path(folder).exists()
