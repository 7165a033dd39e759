"""A function in a forked child: its result, its errors, and that it leaves no process."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from megatron_webrl.trainer.checkpoint.checkpoint_state import ForkedTask, ForkedTaskError
from tests.waiting import until


def test_a_task_returns_more_than_a_pipe_holds() -> None:
    task = ForkedTask(lambda: [1] * 2**18, timeout_seconds=60)
    until(lambda: task.done, "the result", 30)
    assert task.result() == [1] * 2**18
    assert not psutil.pid_exists(task.pid)


def test_a_finished_task_is_no_zombie_before_anybody_asks_for_it() -> None:
    task = ForkedTask(lambda: 1, timeout_seconds=60)
    until(lambda: not psutil.pid_exists(task.pid), "the child to be reaped", 30)
    assert task.done
    assert task.result() == 1


def test_an_error_of_the_task_is_one_line() -> None:
    def fail() -> None:
        raise OSError("no room\nsecond line")

    with pytest.raises(ForkedTaskError, match=r"^OSError: no room$"):
        ForkedTask(fail, timeout_seconds=60).result()


def test_a_killed_task_says_so() -> None:
    task = ForkedTask(lambda: time.sleep(60), timeout_seconds=60)
    os.kill(task.pid, signal.SIGKILL)
    with pytest.raises(ForkedTaskError, match="was killed by SIGKILL"):
        task.result()
    assert not psutil.pid_exists(task.pid)


def test_a_late_task_is_killed() -> None:
    task = ForkedTask(lambda: time.sleep(60), timeout_seconds=0.5)
    assert not task.done
    with pytest.raises(ForkedTaskError, match="not finished within"):
        task.result()
    assert not psutil.pid_exists(task.pid)
