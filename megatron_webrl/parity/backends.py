"""Runs one backend in processes of its own, so that its memory and its libraries are its own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.parity.scoring_process import (
    EXIT_BAD_INPUT,
    JOB_FILE,
    ProcessScores,
    ScoringJob,
    error_file,
    scores_file,
)
from megatron_webrl.system import child_process

POLL_SECONDS = 0.05
LOG_TAIL_LINES = 20  # lines of a failed process's output that are shown
GRACE_SECONDS = 10.0  # for the other ranks to say what they think is wrong, once one has ended


class BackendFailed(RuntimeError):
    """A backend ended without scores, or not in time. The message ends with the last lines that it wrote."""


@dataclass(frozen=True)
class BackendScores:
    """What a backend found: all its processes together."""

    backend: str
    logprobs: tuple[np.ndarray, ...]  # per sample float32 [response]
    responses: tuple[np.ndarray, ...]
    load_seconds: float  # of the slowest process, its start included
    score_seconds: float
    peak_bytes: int  # of all processes
    processes: int


def run_backend(
    backend: str, work: ScoringJob, ranks: int, environment: Mapping[str, str], folder: Path
) -> BackendScores:
    """Run `ranks` processes of megatron_webrl.parity.<backend>_scores in a new folder, and wait for them.

    `environment` is added to this process's. Raises ConfigError for input that the backend refuses, BackendFailed if
    a process fails or they take longer than work.seconds.
    """
    folder.mkdir()
    (folder / JOB_FILE).write_bytes(pickle.dumps(work))
    begun = time.monotonic()
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", f"megatron_webrl.parity.{backend}_scores", str(folder)]
            env = {**os.environ, **environment, **place}
            started.append(child_process.start_process(command, folder / f"{rank}.log", env, f"{backend}-{rank}"))
        _wait(backend, started, folder, begun + work.timeout_seconds, work.timeout_seconds)
    finally:
        _kill(started)
    parts = [pickle.loads(scores_file(folder, rank).read_bytes()) for rank in range(ranks)]
    return _together(backend, parts, time.monotonic() - begun)


def _together(backend: str, parts: list[ProcessScores], seconds: float) -> BackendScores:
    scored = max(part.score_seconds for part in parts)
    (whole,) = [part for part in parts if part.logprobs is not None]
    assert whole.logprobs is not None
    return BackendScores(
        backend,
        whole.logprobs,
        whole.responses,
        load_seconds=seconds - scored,
        score_seconds=scored,
        peak_bytes=sum(part.peak_bytes for part in parts),
        processes=len(parts),
    )


def _wait(backend: str, started: list[subprocess.Popen[bytes]], folder: Path, deadline: float, seconds: float) -> None:
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            # The first to end may only have lost its connection to the one that has something to say.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if any(process.poll() == EXIT_BAD_INPUT for process in started):
                break
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    codes = [process.poll() for process in started]
    for rank, code in enumerate(codes):
        if code == EXIT_BAD_INPUT and error_file(folder, rank).is_file():
            raise ConfigError(f"{backend}: {error_file(folder, rank).read_text()}")
    for rank, code in enumerate(codes):
        if code:
            raise BackendFailed(
                f"{backend} process {rank} of {len(codes)} ended with code {code}\n{_tail(folder / f'{rank}.log')}"
            )
    if None in codes:
        raise BackendFailed(
            f"{backend} was not done within {seconds:g} s (--timeout-seconds)\n{_tail(folder / f'{codes.index(None)}.log')}"
        )


def _kill(started: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with the processes that it started: each has a session of its own."""
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        process.wait(GRACE_SECONDS)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-LOG_TAIL_LINES:])
