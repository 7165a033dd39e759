"""What the processes of the test of a resume over two rings do: two trainer ranks without a model, and two workers."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from megatron_webrl.config import Config
from megatron_webrl.control import JobFailed, Stopped, start_at
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.ring import Ring
from tests.planes import connect
from tests.trainer.node_ranks import Member, group
from tests.trainer.sampler_ranks import METRICS

UPDATES, GROUPS, SAVED, KILLED, AHEAD = 12, 3, 2, 4, 2
"""A state is kept of version SAVED; from version KILLED on the rank of node 1 dies in the first update with groups of
both nodes, which both rings then hold.
"""


def make_config(folder: str) -> Config:
    """Two workers and two nodes."""
    config = Config()
    config.run.directory, config.cluster.nodes, config.rollout.engines = folder, 2, 2
    config.trainer.updates, config.trainer.groups_per_update = UPDATES, GROUPS
    config.rollout.max_staleness = AHEAD
    config.tracking.keep_records = True
    return config


def successes(ticket: int) -> int:
    """Of the two episodes of a ticket; some groups fail as a whole and are dropped."""
    return int(ticket % 5 != 3)


def life(rank: int, folder: str, address: tuple[str, int], names: list[str], resumed: bool) -> None:
    """One incarnation of a trainer rank."""
    member = Member(rank, 2, folder, names, exchange_seconds=10.0)
    from megatron_webrl.tracking.metrics import Seconds
    from megatron_webrl.tracking.mlflow_run import Tracker
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint import TrainerState, read_state
    from megatron_webrl.trainer.coordinator import Coordinator
    from megatron_webrl.trainer.score import Gap
    from megatron_webrl.trainer.takeover import begin

    config, control = make_config(folder), connect(address, f"trainer-{rank}")
    state = TrainerState(0, 0, 0, (), Accounting().state(), 0)
    if resumed:
        read = read_state(config.run_folder)
        state = replace(read, incarnation=read.incarnation + 1)
    tracker = Tracker(config, state.mlflow_run, lambda tokens: "") if rank == 0 else None
    beginning = begin(control, member.rings, state, config.run_folder, rank == 0)
    coordinator = Coordinator(config, control, member.rings, state, beginning, tracker)
    coordinator.open_job(state.version)
    if rank == 0:
        control.put("test/version", state.version)
    for version in range(state.version, UPDATES):
        groups = coordinator.collect(version, lambda: False)
        assert isinstance(groups, list)
        workers = {trajectory.worker for each in groups for trajectory in each.trajectories}
        if rank == 1 and version >= KILLED and len(workers) == 2 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        coordinator.record(version + 1, groups, METRICS, Gap(None, 0), Seconds(1, 1, 1, 1, 0), {})
        coordinator.close(groups, version + 1)
        if rank == 0:
            control.put("test/version", version + 1)
            if version + 1 == SAVED:
                (config.run_folder / "state.json").write_text(json.dumps(asdict(coordinator._state(version + 1))))
    coordinator.finish(UPDATES)


def work(address: tuple[str, int], name: str, worker: int) -> None:
    """A worker of node `worker`: writes the groups of its tickets until the job ends; a slow one for node 1."""
    control, finished, written = connect(address, f"rollout-{worker}"), 0, 0
    with Ring.attach(name) as ring, suppress(JobFailed):
        try:
            while True:
                control.check()
                position = control.take_position() if control.opened() else None
                if position is not None:
                    starts, version = control.starts(), control.value("test/version")
                    ticket = start_at(starts, position).ticket(position)
                    assert isinstance(version, int)
                    made = group(ticket, worker, successes(ticket), version)
                    for each in made.trajectories:
                        finished += 1
                        now = replace(each, incarnation=starts[-1].incarnation, finished_at=time.time())
                        ring.write(encode(now), 10.0)
                        written += 1
                    control.close_position(position)
                time.sleep(0.04 * worker + 0.02)
        except Stopped:
            final = {"life": f"rollout-{worker}.1", "finished": finished, "held": finished - written}
            control.put(f"final/rollout-{worker}", final)


def folder_of(folder: Path) -> Path:
    """The run's, made."""
    made = make_config(str(folder)).run_folder
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.yaml").touch()
    return made
