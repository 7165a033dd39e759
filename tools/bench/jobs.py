"""Run whole jobs for benchmarks, one after another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_webrl.system.child_process import die_with_parent

JOB_SECONDS = 3600.0


def run_job(config: Path, name: str, overrides: Sequence[str], folder: Path) -> Path:
    """Run `webrl train` in `folder` and return the run's folder. Raises RuntimeError if the job fails.

    Its output goes to <name>.log. It gets SIGTERM when this process ends.
    """
    locations = [f"run.name={name}", f"run.directory={folder / 'runs'}"]
    command = [sys.executable, "-m", "megatron_webrl", "train", str(config), *locations, *overrides]
    log = folder / f"{name}.log"
    set_death_signal = partial(die_with_parent, signal.SIGTERM, os.getpid())
    with log.open("w") as file:
        try:
            ended = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=JOB_SECONDS,
                check=False,
                preexec_fn=set_death_signal,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"job {name} did not end within {JOB_SECONDS:.0f} s") from None
    if ended.returncode:
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"job {name} ended with exit code {ended.returncode}:\n{last}")
    return folder / "runs" / name
