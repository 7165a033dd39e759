"""Functions in processes of their own: a crash or a hang is an error of one line, and no process is left."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from megatron_webrl.control import child_process
from megatron_webrl.launch.run_folder import sweep_leftovers
from megatron_webrl.launch.signals import exit_by_signal
from megatron_webrl.util.text import configure_logging

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # for the other processes to report their error, once one has failed
EXIT_SECONDS = 5.0  # for a killed process to disappear: one in a call of a hung GPU's driver does not
LOG_TAIL_LINES = 20
NOT_FINISHED = "it did not finish within"  # begins the error of a process whose time has passed


@dataclass
class Outcome:
    """What a process returned before it ended."""

    results: list[Any] = field(default_factory=list)
    error: str = ""  # why it failed, in one line
    log: str = ""  # its last lines


def run_processes(
    function: str, arguments: Sequence[Any], seconds: float, environment: Mapping[str, str] | None = None
) -> list[Outcome]:
    """Iterate over `function(argument)`, for each argument in a process of its own, within a limit; ends them all.

    `function`: "package.module:name", imported in the process, RANK of WORLD_SIZE. Results are kept if their
    process fails later. Temporary files disappear with the processes, which use no network of Hugging Face.
    """
    context, children = multiprocessing.get_context("forkserver"), list[tuple[Any, Connection]]()
    outcomes = list[Outcome]()
    # A short name: sockets in it have paths of up to 107 characters.
    with exit_by_signal(signal.SIGTERM), tempfile.TemporaryDirectory(prefix="webrl-check-") as folder:
        try:
            for rank, argument in enumerate(arguments):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(arguments))}
                variables = {**os.environ, **(environment or {}), **ranks, **child_process.owner_environment()}
                Path(folder, f"{rank}.log").touch()  # the process may end before it opens it
                connection, remote = context.Pipe(duplex=False)
                job = pickle.dumps(argument)  # its import may read variables
                process = context.Process(target=_run, args=(function, job, variables, folder, remote, os.getpid()))
                process.start()
                remote.close()
                children.append((process, connection))
            outcomes = _collect(children, seconds)
        finally:
            for process, _ in children:
                _end(process)
            for rank, outcome in enumerate(outcomes):
                lines = Path(folder, f"{rank}.log").read_text(errors="replace").splitlines()
                outcome.log = "\n".join(lines[-LOG_TAIL_LINES:])
            if not outcomes or any(outcome.error for outcome in outcomes):
                sweep_leftovers()  # of a job that a process had started
    return outcomes


def _collect(children: Sequence[tuple[Any, Connection]], seconds: float) -> list[Outcome]:
    """Receive results until all processes have ended or their time has passed."""
    outcomes, deadline = [Outcome(error=f"{NOT_FINISHED} {seconds:.3g} s") for _ in children], seconds
    running, started = dict(enumerate(children)), time.monotonic()
    while running and time.monotonic() - started < deadline:
        wait([process.sentinel for process, _ in running.values()], POLL_SECONDS)
        for rank, (process, connection) in list(running.items()):
            code = process.exitcode
            with suppress(EOFError, OSError):  # it has ended, perhaps within a message
                while connection.poll():
                    outcomes[rank].results.append(connection.recv())
            if code is not None:
                del running[rank]
                outcomes[rank].error = f"its process {child_process.describe_exit(code)}" if code else ""
                if outcomes[rank].results and isinstance(outcomes[rank].results[-1], _RaisedError):
                    outcomes[rank].error = str(outcomes[rank].results.pop())
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() - started + GRACE_SECONDS)
    return outcomes


def _end(process: Any) -> None:
    """Kill a process, its descendants and its group."""
    for each in child_process.family(process.pid):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.join(EXIT_SECONDS)
    child_process.kill_process_group(process.pid, EXIT_SECONDS)


class _RaisedError(str):
    """The exception that ended a process."""


def _die_with(starter: int, folder: str) -> None:
    """Kill this process group, and remove `folder`, once the process that asked for it ends.

    It is not the parent. That is the fork server, which outlives it.
    """
    try:
        select.select([os.pidfd_open(starter)], [], [])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpid(), signal.SIGKILL)


def _run(
    function: str, job: bytes, variables: Mapping[str, str], folder: str, connection: Connection, starter: int
) -> None:
    """The process: sends each result as it comes."""
    os.setsid()
    threading.Thread(target=_die_with, args=(starter, folder), daemon=True).start()
    log = os.open(f"{folder}/{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(variables, HF_HUB_OFFLINE="1")
    tempfile.tempdir = folder
    configure_logging("check", logging.WARNING)
    code, (module, _, name) = 0, function.partition(":")
    try:
        for result in getattr(importlib.import_module(module), name)(pickle.loads(job)):
            connection.send(result)
    except Exception as error:  # any failure is a line of the report
        logging.exception("failed")
        connection.send(_RaisedError(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"))
        code = 1
    # Not sys.exit: it would wait for threads of an engine, and for the destructor of a failed NCCL group.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
