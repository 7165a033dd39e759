"""A job of two ranks that saves in a loop and is killed repeatedly; each start checks the files of the last one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_webrl.control.child_process import become_subreaper, die_with_parent
from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
    checkpoints_in,
    laid_out,
    make_learner,
    session,
    state_of,
    step,
)

LIMIT_SECONDS = 60.0
SAVES = 4  # of the first start, to learn how long one takes


def drive(_: int, folder: str, rounds: int, seed: int) -> None:
    """Start and kill the job `rounds` times, and start it once more; writes the report of each start to rounds.json.

    The ranks are forked from this process, which has imported the modules already: a start takes one second.
    """
    become_subreaper()  # processes that outlive a rank become children of this process
    rng, found = random.Random(seed), []
    for number in range(rounds + 1):
        ranks = [_fork(rank, Path(folder), number) for rank in (0, 1)]
        report = Path(folder, f"round-{number}.json")
        _wait(report.exists, f"round {number} did not start")
        if number == 0:
            begun = time.monotonic()
            _wait(lambda: _latest(folder) >= SAVES, "the job does not save")
            period = (time.monotonic() - begun) / SAVES
        if number < rounds:
            time.sleep(rng.uniform(0, 3 * period))  # the random point of the kill
        for pid in rng.sample(ranks, 2):
            os.kill(pid, signal.SIGKILL)
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.05))  # the other rank runs on for a moment
        _wait(_nothing_left, f"round {number}: a process outlives the ranks")
        left = sorted(path.name for path in Path(folder, "checkpoints").glob(".staging-*/*"))
        found.append(json.loads(report.read_text()) | {"left": left})
    Path(folder, "rounds.json").write_text(json.dumps(found))


def _wait(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.002)


def _latest(folder: str) -> int:
    pointer = Path(folder, "checkpoints", "latest")
    return int(pointer.read_text().removeprefix("version-")) if pointer.exists() else 0


def _nothing_left() -> bool:
    """Whether all children have ended; reaps them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    return not psutil.Process().children()


def _fork(rank: int, folder: Path, number: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent=parent)
            _job(rank, folder, number)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    return pid


def _job(rank: int, folder: Path, number: int) -> None:
    """Check the files of the last round, report, and save one version after the other until killed."""
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
    from megatron_webrl.trainer.checkpoint.checkpointer import read_trainer_state
    from megatron_webrl.trainer.parallel import all_gather_object

    rendezvous = folder / f"rendezvous-{number}"
    rendezvous.mkdir(exist_ok=True)
    layout = LAYOUTS[number % 2]  # replicas and tensor-parallel in turn
    with session(rank, str(rendezvous)), laid_out(layout):
        learner = make_learner(layout)
        step(learner)  # gives the optimiser moments
        checkpoints = checkpoints_in(folder)
        torch.distributed.barrier()  # the first rank has deleted the leftovers
        report: dict[str, Any] = {"swept": not list((folder / "checkpoints").glob(".staging-*/*")), "version": 0}
        if (folder / "checkpoints" / "latest").exists():
            path = latest_checkpoint(folder)
            load_learner(path, learner)
            report["version"] = read_trainer_state(path).version
            report["values"] = _values(learner)
        reports = all_gather_object(report)
        if rank == 0:
            temporary = folder / "round.tmp"
            temporary.write_text(json.dumps({"ranks": reports}))
            temporary.rename(folder / f"round-{number}.json")
        version = report["version"]
        while True:
            version += 1
            _fill(learner, version)
            checkpoints.start_save(learner, state_of(version))
            _fill(learner, -1)  # training continues
            checkpoints.poll()


def _fill(learner: Any, version: int) -> None:
    """Set every number of the state to the version."""
    with torch.no_grad():
        for tensor in _tensors(learner):
            tensor.fill_(version)


def _values(learner: Any) -> list[float]:
    """The different numbers of the state."""
    return sorted({float(value) for tensor in _tensors(learner) for value in tensor.unique()})


def _tensors(learner: Any) -> list[torch.Tensor]:
    weights = [parameter for chunk in learner.chunks for parameter in chunk.parameters()]
    states = [part.optimizer.state.values() for part in learner.optimizer.optimizer.chained_optimizers]
    moments = [values[name] for state in states for values in state for name in ("exp_avg", "exp_avg_sq")]
    return weights + moments
