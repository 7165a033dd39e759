"""Run whole jobs for benchmarks, one after another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_webrl.control.child_process import die_with_parent

JOB_SECONDS = 3600.0
POLL_SECONDS = 1.0
STOPPED_EXIT = 130  # of a job that ended early, with a checkpoint and a summary


def run_job(
    config: Path, name: str, overrides: Sequence[str], folder: Path,
    should_stop: Callable[[], bool] = lambda: False, limit_seconds: float = JOB_SECONDS,
) -> Path:  # fmt: skip
    """Run `webrl train` in `folder` and return the run's folder. Raises RuntimeError if the job fails.

    Its output goes to <name>.log. It gets SIGTERM when this process ends. Once `should_stop`, asked every second, is
    true, the job ends after its current update.
    """
    locations = [f"run.name={name}", f"run.directory={folder / 'runs'}"]
    command = [sys.executable, "-m", "megatron_webrl", "train", str(config), *locations, *overrides]
    log = folder / f"{name}.log"
    set_death_signal = partial(die_with_parent, signal.SIGTERM, os.getpid())
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=set_death_signal) as process,
    ):
        try:
            stopped = wait_for_end(process, name, should_stop, limit_seconds)
        except BaseException:  # the limit of time, an error of `should_stop`, Ctrl-C
            process.kill()
            raise
    if process.returncode and not (stopped and process.returncode == STOPPED_EXIT):
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"job {name} ended with exit code {process.returncode}:\n{last}")
    return folder / "runs" / name


def wait_for_end(
    process: subprocess.Popen[bytes], name: str, should_stop: Callable[[], bool], limit_seconds: float
) -> bool:
    """Wait until the job has ended; returns whether it was asked to stop. Raises RuntimeError after the limit."""
    deadline, stopped = time.monotonic() + limit_seconds, False
    while True:
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise RuntimeError(f"job {name} did not end within {limit_seconds:.0f} s") from None
            if not stopped and should_stop():
                process.send_signal(signal.SIGINT)
                stopped = True
        else:
            return stopped
