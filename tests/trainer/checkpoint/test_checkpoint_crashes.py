"""A job of two ranks that saves all the time is killed at random moments: the newest checkpoint always loads."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_webrl.control.child_process import become_subreaper, die_with_parent
from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
from megatron_webrl.trainer.checkpoint.checkpointer import read_trainer_state
from megatron_webrl.trainer.parallel import all_gather_object
from tests import forks, gloo
from tests.trainer.checkpoint.small_learner import LAYOUTS, checkpoints_in, make_learner, state_of, step
from tests.trainer.ranks import process_groups
from tests.waiting import until

KILLS, SEED = 16, 7
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
        until(report.exists, f"round {number} did not start")
        if number == 0:
            begun = time.monotonic()
            until(lambda: _latest(folder) >= SAVES, "the job does not save")
            period = (time.monotonic() - begun) / SAVES
        if number < rounds:
            time.sleep(rng.uniform(0, 3 * period))  # the random point of the kill
        for pid in rng.sample(ranks, 2):
            os.kill(pid, signal.SIGKILL)
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.05))  # the other rank runs on for a moment
        until(_nothing_left, f"round {number}: a process outlives the ranks")
        left = sorted(path.name for path in Path(folder, "checkpoints").glob(".staging-*/*"))
        found.append(json.loads(report.read_text()) | {"left": left})
    Path(folder, "rounds.json").write_text(json.dumps(found))


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
    rendezvous = folder / f"rendezvous-{number}"
    rendezvous.mkdir(exist_ok=True)
    layout = LAYOUTS[("replicas", "tensor")[number % 2]]
    gloo.join(rank, 2, str(rendezvous))
    with process_groups(layout):
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_a_kill_at_any_moment_the_latest_checkpoint_is_complete(tmp_path: Path) -> None:
    context = forks.start(drive, str(tmp_path), KILLS, SEED, ranks=1)
    try:
        assert context.join(timeout=570), "the job was not killed and started often enough within its limit"
    finally:
        context.processes[0].kill()
    rounds = json.loads((tmp_path / "rounds.json").read_text())
    assert len(rounds) == KILLS + 1
    versions = []
    for number, found in enumerate(rounds):
        one, two = found["ranks"]
        assert one == two
        assert one["swept"]
        if one["version"]:
            assert one["values"] == [one["version"]], f"round {number} mixes versions"
        versions.append(one["version"])
    assert versions == sorted(versions)
    # Kills hit saves in progress, and the job made progress between them.
    assert sum(any(name.isdigit() for name in found["left"]) for found in rounds) >= 5
    assert versions[-1] > SAVES
