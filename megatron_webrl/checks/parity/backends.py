"""Runs one backend in separate processes, so that backends share neither memory nor libraries."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_webrl.checks.parity.scoring_process import (
    EXIT_BAD_INPUT,
    JOB_FILE,
    ProcessScores,
    ScoringJob,
    error_file,
    scores_file,
)
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util import child_process

POLL_SECONDS = 0.05
LOG_TAIL_LINES = 20  # shown lines of a failed process's log
GRACE_SECONDS = 10.0  # for the other ranks to report their error, once one has failed


class BackendFailed(RuntimeError):
    """A backend process failed or exceeded its limit. The message ends with the last lines of its log."""


@dataclass(frozen=True)
class BackendScores:
    """Scores and costs of a backend, over all its processes."""

    backend: str
    logprobs: tuple[np.ndarray, ...]  # per sample float32 [response]
    responses: tuple[np.ndarray, ...]
    load_seconds: float  # process start included
    score_seconds: float
    peak_bytes: int  # sum over all processes
    processes: int


def run_backend(
    backend: str, job: ScoringJob, ranks: int, environment: Mapping[str, str], folder: Path
) -> BackendScores:
    """Run `ranks` processes of megatron_webrl.checks.parity.<backend>_scores in a new folder, and wait for them.

    `environment` extends this one's. Raises ConfigError for refused input, BackendFailed for a failure or a timeout.
    """
    folder.mkdir()
    (folder / JOB_FILE).write_bytes(pickle.dumps(job))
    started = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            rank_variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", f"megatron_webrl.checks.parity.{backend}_scores", str(folder)]
            env = {**os.environ, **environment, **rank_variables}
            processes.append(child_process.start_process(command, folder / f"{rank}.log", env, f"{backend}-{rank}"))
        _wait(backend, processes, folder, started + job.timeout_seconds, job.timeout_seconds)
    finally:
        for process in processes:
            child_process.terminate_tree(process)
    parts = [pickle.loads(scores_file(folder, rank).read_bytes()) for rank in range(ranks)]
    return _combine(backend, parts, time.monotonic() - started)


def _combine(backend: str, parts: list[ProcessScores], seconds: float) -> BackendScores:
    score_seconds = max(part.score_seconds for part in parts)
    (whole,) = [part for part in parts if part.logprobs is not None]
    assert whole.logprobs is not None
    return BackendScores(
        backend,
        whole.logprobs,
        whole.responses,
        load_seconds=seconds - score_seconds,
        score_seconds=score_seconds,
        peak_bytes=sum(part.peak_bytes for part in parts),
        processes=len(parts),
    )


def _wait(
    backend: str, processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float, seconds: float
) -> None:
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            # The first rank to end may only have lost its connection to the rank that knows the reason.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if any(process.poll() == EXIT_BAD_INPUT for process in processes):
                break
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    codes = [process.poll() for process in processes]
    for rank, code in enumerate(codes):
        if code == EXIT_BAD_INPUT and error_file(folder, rank).is_file():
            raise ConfigError(f"{backend}: {error_file(folder, rank).read_text()}")
    for rank, code in enumerate(codes):
        if code:
            raise BackendFailed(
                f"{backend} process {rank} of {len(codes)} {child_process.describe_exit(code)}\n"
                f"{_tail(folder / f'{rank}.log')}"
            )
    if None in codes:
        raise BackendFailed(
            f"{backend} did not finish within {seconds:g} s (--timeout-seconds)\n"
            f"{_tail(folder / f'{codes.index(None)}.log')}"
        )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-LOG_TAIL_LINES:])
