"""Work in a copy of this process, made by fork: it sees memory as it was, and the original goes on changing it."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_webrl.system.child_process import die_with_parent

_PAUSE = 0.01
_TELL = signal.SIGUSR1  # the copy writes down where it is
_TELL_SECONDS = 0.3


class ForkedTaskError(RuntimeError):
    """The work failed, was killed or took too long. The message is one line."""


class ForkedTask:
    """One piece of work under way. It dies with this process, and `result` never waits past its limit.

    The copy has none of this process's other threads, so the work must need no lock that one of them may hold, nor
    CUDA: it should read memory and write files, and say nothing.
    """

    def __init__(self, function: Callable[[], Any], timeout_seconds: float) -> None:
        """Start `work`, whose result must be picklable. Call from the main thread: the copy dies with the thread."""
        self._deadline, self._seconds = time.monotonic() + timeout_seconds, timeout_seconds
        self._answer = os.memfd_create("forked_task")  # a pipe would block the copy once it is full
        self._trace = os.memfd_create("forked_task_trace")
        self._status: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, parent)

    def _run(self, work: Callable[[], Any], parent: int) -> None:
        """The life of the copy; does not return."""
        code = 1
        try:
            die_with_parent(parent=parent)
            faulthandler.register(_TELL, file=self._trace, all_threads=False)
            gc.disable()  # a collection would run finalisers of objects that belong to the original
            torch.set_num_threads(1)  # the pool of threads was not copied
            try:
                answer = (True, work())
            except Exception as error:  # whatever it is, the original has to hear of it
                answer = (False, one_line_error(error))
            with os.fdopen(self._answer, "wb") as file:
                pickle.dump(answer, file)
            code = 0
        finally:
            os._exit(code)

    @property
    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._reaped() or time.monotonic() > self._deadline

    def result(self) -> Any:
        """Wait for the work and return its result. Raises BackgroundError. To be called once."""
        while not self.done:
            time.sleep(_PAUSE)
        late = not self._reaped()
        if late:
            where = self._whereabouts()
            os.kill(self.pid, signal.SIGKILL)
            _, self._status = os.waitpid(self.pid, 0)
        try:
            if late:
                raise ForkedTaskError(f"not finished within {self._seconds:.0f} s, {where}")
            if self._status:
                code = os.waitstatus_to_exitcode(self._status)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                raise ForkedTaskError(f"the writing process {how}")
            os.lseek(self._answer, 0, os.SEEK_SET)
            with os.fdopen(os.dup(self._answer), "rb") as file:
                good, value = pickle.load(file)
        finally:
            os.close(self._answer)
            os.close(self._trace)
        if not good:
            raise ForkedTaskError(value)
        return value

    def _whereabouts(self) -> str:
        """What a late copy is at: its innermost calls, or the state that it is in if it does not say."""
        try:
            state = psutil.Process(self.pid).status()
            os.kill(self.pid, _TELL)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return "ended just now"
        time.sleep(_TELL_SECONDS)
        trace = os.pread(self._trace, 2**14, 0).decode(errors="replace")
        calls = re.findall(r'File "(.+?)", line (\d+) in (\S+)', trace)[:3]
        if not calls:
            return state
        return f"{state} in " + " of ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in calls)

    def _reaped(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None


def one_line_error(error: BaseException) -> str:
    """An error as one line: type and first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
