"""A child process over its restarts: when it failed, why, how often it is restarted, and after what delay."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired

from megatron_webrl.util import child_process
from megatron_webrl.util.child_process import ChildProcess

HOUR = 3600.0  # seconds
FIRST_DELAY_SECONDS = 1.0  # before the second restart; doubles with each further one
MAX_DELAY_SECONDS = 60.0
JITTER = 0.5  # largest share of a delay that chance takes off, so that processes that fail together restart apart


def restart_delay(number: int, chance: float) -> float:
    """Seconds before restart `number` of a series, from 1: the first is immediate. `chance`: from [0, 1]."""
    if number <= 1:
        return 0.0
    return min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(number - 2, 16)) * (1 - JITTER * chance)


@dataclass
class RestartPolicy:
    """Budget of one process: at most `max_restarts` within any `window_seconds`.

    A failure is recorded by `next_restart`, which grants a restart or returns None once the budget is spent. Restarts
    older than the window are forgotten, and with them the delay that they added.
    """

    max_restarts: int
    window_seconds: float = HOUR
    _failures: deque[float] = field(default_factory=deque)  # times of those after which a restart was granted

    def next_restart(self, now: float) -> float | None:
        """The time of the restart after a failure at `now` (monotonic seconds); None if the budget is spent."""
        while self._failures and now - self._failures[0] >= self.window_seconds:
            self._failures.popleft()
        if self.used >= self.max_restarts:
            return None
        self._failures.append(now)
        return now + restart_delay(self.used, random.random())

    @property
    def used(self) -> int:
        """Restarts granted within the window that ended with the last failure."""
        return len(self._failures)


@dataclass
class SupervisedProcess:
    """Life cycle: made, `start`, then `poll_failure` repeatedly; after a failure `schedule_restart` or nothing."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    cores: tuple[int, ...] = ()  # to bind it to; empty: any
    policy: RestartPolicy = field(default_factory=lambda: RestartPolicy(0))
    may_exit: bool = True  # whether exit code 0 is no failure
    process: ChildProcess = field(init=False)
    started_at: float = 0.0  # monotonic time of the last start
    restart_at: float | None = None  # monotonic time of the scheduled restart
    survived_kill: bool = False  # this life did not end after SIGKILL
    _reported: bool = False  # whether `poll_failure` has reported the end of this life

    def start(self) -> SupervisedProcess:
        """Start the process in the main thread. Raises ProcessError."""
        self.process = child_process.start_process(self.command, self.log, self.environment, self.name, self.cores)
        self.started_at, self.restart_at = time.monotonic(), None
        self.survived_kill = self._reported = False
        return self

    @property
    def is_active(self) -> bool:
        """Whether the process runs or will."""
        return self.restart_at is not None or self.process.poll() is None

    def failure_message(self) -> str | None:
        """How this life of the process failed; None while it runs and after a clean exit."""
        code = self.process.poll()
        if code is None and self.survived_kill:
            late = f"runs {child_process.KILL_SECONDS:g} s after SIGKILL, in a call to a file system or device"
            return f"{self.name} {late} (log: {self.log})"
        if code is None or (code == 0 and self.may_exit):
            return None
        return f"{self.name} {self.process.describe_end()} (log: {self.log})"

    def poll_failure(self) -> str | None:
        """The message of a failure, once per life."""
        if self.restart_at is not None or self._reported or (message := self.failure_message()) is None:
            return None
        self._reported = True
        return message

    def kill(self) -> None:
        """Kill the process. It has failed, too, if it does not end within KILL_SECONDS."""
        self.process.kill()
        try:
            self.process.wait(child_process.KILL_SECONDS)
        except TimeoutExpired:
            self.survived_kill = True

    def schedule_restart(self) -> bool:
        """Kill what is left of the process, and schedule a restart if the policy grants one."""
        child_process.kill_process_group(self.process.pid)
        self.restart_at = self.policy.next_restart(time.monotonic())
        return self.restart_at is not None

    def restart_if_due(self) -> bool:
        """Start the process again if it is time. Raises ProcessError."""
        if self.restart_at is None or time.monotonic() < self.restart_at:
            return False
        self.start()
        return True
