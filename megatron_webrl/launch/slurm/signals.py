"""Tells Slurm's notices, that the job will end soon, from signals that end a process at once.

Notices: SIGUSR1 (sbatch --signal), the SIGTERM that begins a pre-emption's grace period. Others end the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

NOTICE_SIGNAL = signal.SIGUSR1
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SCONTROL_SECONDS = 10.0  # limit for scontrol to show the job


@dataclass
class SignalListener:
    """Collects and classifies signals. Call `listen` once, then `poll` repeatedly; both in the main thread."""

    end_signal: int = 0  # the signal that ends the process; 0: none yet
    notice_signal: int = 0  # the first notice; 0: none yet
    _received: list[int] = field(default_factory=list)
    _parent: int = field(default_factory=os.getppid)

    def listen(self) -> None:
        for number in (NOTICE_SIGNAL, *END_SIGNALS):
            signal.signal(number, self._handle)

    def poll(self) -> None:
        """Classify the signals received since the last call."""
        while self._received and not self.end_signal:
            number = self._received.pop(0)
            if os.getppid() == self._parent and is_notice(number, os.environ):
                self.notice_signal = self.notice_signal or number
            else:
                self.end_signal = number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)


def is_notice(number: int, environment: Mapping[str, str]) -> bool:
    """Whether the job keeps running for a grace period after a signal; a SIGTERM is looked up in Slurm."""
    if number == NOTICE_SIGNAL:
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
