"""A function in a forked child: its result, its errors, and that it leaves no process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_webrl.trainer.checkpoint.checkpoint_state import ForkedTask, ForkedTaskError
from tests.waiting import exit_code, fork, until


def test_a_task_returns_more_than_a_pipe_holds_and_a_finished_one_is_no_zombie() -> None:
    large, small = ForkedTask(lambda: [1] * 2**18, timeout_seconds=60), ForkedTask(lambda: 1, timeout_seconds=60)
    until(lambda: not psutil.pid_exists(small.pid), "the child to be reaped before anybody asks for it", 30)
    assert small.done
    assert small.result() == 1
    until(lambda: large.done, "the result", 30)
    assert large.result() == [1] * 2**18
    assert not psutil.pid_exists(large.pid)


def test_what_fails_is_killed_or_late_says_so_in_one_line_and_is_gone() -> None:
    def fail() -> None:
        raise OSError("no room\nsecond line")

    failing, killed, late = (
        ForkedTask(fail, 60),
        ForkedTask(lambda: time.sleep(60), 60),
        ForkedTask(lambda: time.sleep(60), 0.5),
    )
    os.kill(killed.pid, signal.SIGKILL)
    assert not late.done
    for task, message in (
        (failing, r"^OSError: no room$"), (killed, "was killed by SIGKILL"), (late, "not finished within"),
    ):  # fmt: skip
        with pytest.raises(ForkedTaskError, match=message):
            task.result()
        assert not psutil.pid_exists(task.pid)


def test_a_task_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    def start_and_die() -> None:
        task = ForkedTask(lambda: time.sleep(60), 60)
        (tmp_path / "pid").write_text(str(task.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(fork(start_and_die)) == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end", 10)
