"""What a signal means to the processes of a node: the end at once, or Slurm's notice that the job will end soon.

Notices are SIGUSR1 (sbatch --signal), and SIGTERM at the beginning of the grace period of a pre-emption. Anything else
that is caught is the end: scancel, the time limit, a parent that is gone.
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
SCONTROL_SECONDS = 10.0  # for Slurm to say what it is about to do


@dataclass
class SignalListener:
    """Those that came. `listen` once, then `look` again and again; both in the main thread."""

    end_signal: int = 0  # the signal that asked for the end
    notice_signal: int = 0  # the first that was a notice
    _came: list[int] = field(default_factory=list)
    _parent: int = field(default_factory=os.getppid)

    def listen(self) -> None:
        """From here on signals are noted."""
        for number in (NOTICE_SIGNAL, *END_SIGNALS):
            signal.signal(number, self._note)

    def poll(self) -> None:
        """Sort out what came since the last call."""
        while self._came and not self.end_signal:
            number = self._came.pop(0)
            if os.getppid() == self._parent and is_notice(number, os.environ):
                self.notice_signal = self.notice_signal or number
            else:
                self.end_signal = number

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)


def is_notice(number: int, environment: Mapping[str, str]) -> bool:
    """Whether the job goes on for its grace period after a signal; asks Slurm where the signal does not say."""
    if number == NOTICE_SIGNAL:
        return True
    if number != signal.SIGTERM or "SLURM_JOB_ID" not in environment:
        return False
    command = ["scontrol", "show", "job", "--oneliner", environment["SLURM_JOB_ID"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # a container has no Slurm: the node ends, and the job goes on from its last checkpoint
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return words.get("JobState") == "RUNNING" and words.get("PreemptTime", "None") != "None"
