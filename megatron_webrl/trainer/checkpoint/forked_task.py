"""Run a function in a forked copy of this process, which keeps memory as it was at the fork."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_webrl.util.child_process import die_with_parent

_TRACE_SIGNAL = signal.SIGUSR1  # makes the child write its stack
_TRACE_SECONDS = 0.3
_KILL_SECONDS = 1.0


class ForkedTaskError(RuntimeError):
    """The task failed, was killed or timed out. The message is one line."""


class ForkedTask:
    """A function running in a forked child. It dies with this process; `result` never waits past the timeout.

    The child lacks the other threads: the function must need no lock that one may hold, no CUDA and no logging. A
    thread waits for its end: it is no zombie however late `done` or `result` is called.
    """

    def __init__(self, function: Callable[[], Any], timeout_seconds: float) -> None:
        """Start `function`; its result must be picklable. Call from the main thread: the child dies with the thread."""
        self._deadline, self._timeout_seconds = time.monotonic() + timeout_seconds, timeout_seconds
        self._outcome = os.memfd_create("forked_task")  # a pipe would block the child once it is full
        self._trace = os.memfd_create("forked_task_trace")
        self._status = 0  # as os.waitpid returns it; valid once it has ended
        self._ended = threading.Event()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._run_child(function, parent)
        threading.Thread(target=self._reap, name="forked task", daemon=True).start()

    def _run_child(self, function: Callable[[], Any], parent: int) -> None:
        """Run the function in the child and exit; does not return."""
        code = 1
        try:
            die_with_parent(parent=parent)
            faulthandler.register(_TRACE_SIGNAL, file=self._trace, all_threads=False)
            gc.disable()  # a collection would run finalisers of objects that belong to the parent
            torch.set_num_threads(1)  # the pool of threads was not copied
            try:
                outcome = (True, function())
            except Exception as error:  # every error is reported to the parent
                outcome = (False, one_line_error(error))
            with os.fdopen(self._outcome, "wb") as file:
                pickle.dump(outcome, file)
            code = 0
        finally:
            os._exit(code)

    @property
    def done(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._ended.is_set() or time.monotonic() > self._deadline

    def result(self) -> Any:
        """Wait for the function and return its result. Raises ForkedTaskError. Call it once."""
        timed_out = not self._ended.wait(max(0.0, self._deadline - time.monotonic()))
        if timed_out:
            where = self._current_calls()
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._ended.wait(_KILL_SECONDS)  # a file system that stalls keeps it longer
        try:
            if timed_out:
                raise ForkedTaskError(f"not finished within {self._timeout_seconds:.0f} s, {where}")
            if self._status:
                code = os.waitstatus_to_exitcode(self._status)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                raise ForkedTaskError(f"the writing process {how}")
            os.lseek(self._outcome, 0, os.SEEK_SET)
            with os.fdopen(os.dup(self._outcome), "rb") as file:
                succeeded, value = pickle.load(file)
        finally:
            os.close(self._outcome)
            os.close(self._trace)
        if not succeeded:
            raise ForkedTaskError(value)
        return value

    def _current_calls(self) -> str:
        """Process state and innermost calls of the child; the state alone if it writes no stack."""
        try:
            state = psutil.Process(self.pid).status()
            os.kill(self.pid, _TRACE_SIGNAL)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return "ended meanwhile"
        time.sleep(_TRACE_SECONDS)
        trace = os.pread(self._trace, 2**14, 0).decode(errors="replace")
        calls = re.findall(r'File "(.+?)", line (\d+) in (\S+)', trace)[:3]
        if not calls:
            return state
        return f"{state} in " + " of ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in calls)

    def _reap(self) -> None:
        _, self._status = os.waitpid(self.pid, 0)
        self._ended.set()


def one_line_error(error: BaseException) -> str:
    """An error as one line: type and first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
