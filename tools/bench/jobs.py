"""Whole jobs, as benchmarks run them one after another."""

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
    """Run `webrl train` in `folder` to its end; returns the run's folder. Raises RuntimeError.

    What it prints goes to <name>.log there. It is told to end when this process is gone.
    """
    places = [f"run.name={name}", f"run.directory={folder / 'runs'}"]
    words = [sys.executable, "-m", "megatron_webrl.cli", "train", str(config), *places, *overrides]
    log = folder / f"{name}.log"
    orphaned = partial(die_with_parent, signal.SIGTERM, os.getpid())
    with log.open("w") as file:
        try:
            ended = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, timeout=JOB_SECONDS, check=False, preexec_fn=orphaned
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"job {name} was not done within {JOB_SECONDS:.0f} s") from None
    if ended.returncode:
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"job {name} ended with {ended.returncode}:\n{last}")
    return folder / "runs" / name
