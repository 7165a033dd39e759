"""Tells signals after which a job goes on for a while, to save, from those that end it at once.

A job on this machine goes on after its first Ctrl-C, a Slurm job after SIGUSR1 (sbatch --signal) and the SIGTERM that
begins a pre-emption's grace period.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

SCONTROL_SECONDS = 10.0  # limit for scontrol to show the job


@contextmanager
def exit_by_signal(*numbers: int) -> Iterator[None]:
    """Let these signals raise SystemExit in this context, so that it cleans up; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class SignalListener:
    """Collects and classifies signals. Enter `listening` once, then `poll` repeatedly; both in the main thread."""

    is_local: bool = False  # a job on this machine only
    notice_signal: int = 0  # the first after which the job goes on; 0: none yet
    end_signals: list[int] = field(default_factory=list)
    _received: list[int] = field(default_factory=list)
    _parent: int = field(default_factory=os.getppid)

    @property
    def end_signal(self) -> int:
        """The signal that ends the process; 0: none yet."""
        return self.end_signals[0] if self.end_signals else 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive signals in this context."""
        numbers = (signal.SIGTERM, signal.SIGINT, *(() if self.is_local else (signal.SIGUSR1,)))
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def poll(self) -> None:
        """Classify the signals received since the last call."""
        while self._received:
            number = self._received.pop(0)
            if self.is_local:
                goes_on = number == signal.SIGINT and not self.notice_signal
            else:
                goes_on = os.getppid() == self._parent and not self.end_signals and is_notice(number, os.environ)
            if goes_on:
                self.notice_signal = self.notice_signal or number
            else:
                self.end_signals.append(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)


def is_notice(number: int, environment: Mapping[str, str]) -> bool:
    """Whether a Slurm job keeps running for a grace period after a signal; a SIGTERM is looked up in Slurm."""
    if number == signal.SIGUSR1:
        return True
    if number != signal.SIGTERM or "SLURM_JOB_ID" not in environment:
        return False
    command = ["scontrol", "show", "job", "--oneliner", environment["SLURM_JOB_ID"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # a container without Slurm: the node ends, and the requeued job resumes from its last checkpoint
    fields = dict(field.split("=", 1) for field in done.stdout.split() if "=" in field)
    return fields.get("JobState") == "RUNNING" and fields.get("PreemptTime", "None") != "None"
