"""A child process over its restarts: when it failed, why, and when it starts again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired

from megatron_webrl.util import child_process
from megatron_webrl.util.child_process import ChildProcess
from megatron_webrl.util.restart_policy import RestartPolicy


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
        self.process = child_process.start_process(self.command, self.log, self.environment, self.name, (), self.cores)
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
            seconds = child_process.KILL_SECONDS
            return (
                f"{self.name} runs {seconds:g} s after SIGKILL, in a call to a file system or device (log: {self.log})"
            )
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

    def schedule_restart(self, reason: str) -> bool:
        """Kill what is left of the process, and schedule a restart if the policy grants one."""
        child_process.kill_process_group(self.process.pid)
        self.restart_at = self.policy.next_restart(time.monotonic(), reason)
        return self.restart_at is not None

    def restart_if_due(self) -> bool:
        """Start the process again if it is time. Raises ProcessError."""
        if self.restart_at is None or time.monotonic() < self.restart_at:
            return False
        self.start()
        return True
