"""Parts of a check in processes of their own, so that a crash or a hang is a line of the report."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.launch import run_folder
from megatron_webrl.util import child_process
from megatron_webrl.util.text import configure_logging

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # for the other processes to report their error, once one has failed
LOG_TAIL_LINES = 20  # of a failed process


@dataclass(frozen=True)
class Outcome:
    """What processes returned before they ended."""

    results: list[list[Any]]  # of each process
    error: str  # why one of them failed, in one line; empty if none did
    log: str  # the last lines of that process
    seconds: float


def run_processes(
    function: str,
    argument: Any,
    seconds: float,
    *,
    count: int = 1,
    environment: Mapping[str, str] | None = None,
    progress: Callable[[Any], None] = lambda last: None,
) -> Outcome:
    """Iterate over a function's results in `count` processes, RANK of WORLD_SIZE, within a limit; ends them all.

    `function`: "module:name" in this package, called with `argument`. Results are kept if their process fails later.
    The processes' temporary files disappear with them, and they use no network. `progress` is told of the last result.
    """
    with tempfile.TemporaryDirectory(prefix="webrl-check-") as name:
        folder, started = Path(name), time.monotonic()
        (folder / "job").write_bytes(pickle.dumps((function, argument)))
        processes: list[child_process.ChildProcess] = []
        try:
            for rank in range(count):
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "HF_HUB_OFFLINE": "1",
                }
                command = [sys.executable, "-c", f"from {__name__} import main; main({name!r})"]
                env = {**os.environ, **(environment or {}), **variables}
                label = f"check {function}"
                processes.append(child_process.start_process(command, folder / f"{rank}.log", env, label))
            error, rank = _wait(processes, started, seconds, lambda: progress((_read(folder, 0) or [None])[-1]))
        finally:
            for process in processes:
                child_process.terminate_tree(process)
        if error:
            run_folder.sweep_leftovers()  # of a job that a process had started
        errors = [each for rank in range(count) if isinstance(each := (_read(folder, rank) or [None])[-1], ChildError)]
        log = "\n".join((folder / f"{rank}.log").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        results = [[each for each in _read(folder, r) if not isinstance(each, ChildError)] for r in range(count)]
        return Outcome(results, errors[0].text if errors else error, log if error else "", time.monotonic() - started)


def _wait(
    processes: list[child_process.ChildProcess], started: float, seconds: float, report: Callable[[], None]
) -> tuple[str, int]:
    """Wait for all; returns why a process failed, and its rank."""
    deadline = started + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            # The first process to end may only have lost its connection to the one that knows the reason.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        report()
        time.sleep(POLL_SECONDS)
    codes = [process.poll() for process in processes]
    for rank, code in enumerate(codes):
        if code:
            return f"process {rank} of {len(codes)} {processes[rank].describe_end()}", rank
    return (f"it did not finish within {seconds:.3g} s", codes.index(None)) if None in codes else ("", 0)


@dataclass(frozen=True)
class ChildError:
    """The exception that ended a process."""

    text: str


def _read(folder: Path, rank: int) -> list[Any]:
    """The complete results of a process."""
    found, path = [], folder / f"{rank}.results"
    if path.is_file():
        with path.open("rb") as file:
            while True:
                try:
                    found.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return found


def main(folder: str) -> None:
    """Run the function of the folder's job, and write each result as it comes."""
    configure_logging(logging.BASIC_FORMAT, logging.WARNING)
    tempfile.tempdir = folder  # which the parent removes, also if this process is killed
    function, argument = pickle.loads((Path(folder) / "job").read_bytes())
    code = 0
    with (Path(folder) / f"{os.environ['RANK']}.results").open("ab", buffering=0) as output:
        try:
            module, _, name = function.partition(":")
            run: Callable[[Any], Iterator[Any]] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
            for result in run(argument):
                output.write(pickle.dumps(result))
        except Exception as error:  # any failure is a line of the report
            logging.exception("failed")
            output.write(pickle.dumps(ChildError(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")))
            code = 1
    # Not sys.exit: it would wait for threads of an engine, and for the destructor of a failed NCCL group.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
