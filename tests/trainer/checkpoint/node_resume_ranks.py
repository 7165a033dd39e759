"""Process bodies of the test of a resume with two rings: two trainer ranks without a model, and two workers."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from tests.job_control import claim_tickets, connect
from tests.trainer.data.sampler_ranks import METRICS
from tests.trainer.multi_node.node_ranks import Member, group

UPDATES, GROUPS, SAVED, KILLED, AHEAD = 12, 3, 2, 4, 2
"""The state of version SAVED is saved. From version KILLED on the rank of node 1 dies in the first update with groups
from both nodes, which are then in both rings.
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
    """Number of successes among the two episodes of a ticket; some groups fail as a whole and are dropped."""
    return int(ticket % 5 != 3)


def trainer_rank(rank: int, folder: str, address: Path, names: list[str], resumed: bool) -> None:
    """One attempt of a trainer rank; `resumed`: from the saved state."""
    member = Member(rank, 2, folder, names, exchange_seconds=10.0)
    from megatron_webrl.track.metrics import UpdateSeconds
    from megatron_webrl.track.mlflow_upload import MLflowTracker
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
    from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
    from megatron_webrl.trainer.coordinator import Coordinator
    from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch
    from megatron_webrl.trainer.telemetry import UpdateResult

    config, control = make_config(folder), connect(address, f"trainer-{rank}")
    state = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    if resumed:
        read = read_trainer_state(config.run_folder)
        state = replace(read, restart_epoch=read.restart_epoch + 1)
    tracker = MLflowTracker(config) if rank == 0 else None
    resume_point = make_resume_point(control, member.rings, state, config.run_folder, rank == 0)
    coordinator = Coordinator(config, control, member.rings, state, resume_point, tracker)
    if rank == 0:
        control.put_json("test/version", state.version)  # workers read it once they can claim tickets
    coordinator.open_job(state.version)
    for version in range(state.version, UPDATES):
        groups = coordinator.collect(version, lambda: False)
        assert isinstance(groups, list)
        workers = {trajectory.worker for each in groups for trajectory in each.trajectories}
        if rank == 1 and version >= KILLED and len(workers) == 2 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        coordinator.log_update(
            UpdateResult(version + 1, groups, METRICS, LogprobMismatch({}), UpdateSeconds(1, 1, 1, 1, 0), {})
        )
        coordinator.close_update(groups, version + 1)
        if rank == 0:
            control.put_json("test/version", version + 1)
            if version + 1 == SAVED:
                (config.run_folder / "state.json").write_text(
                    json.dumps(asdict(coordinator.trainer_state(version + 1)))
                )
    coordinator.end_job(UPDATES, True)


def work(address: Path, name: str, worker: int) -> None:
    """The worker of node `worker`: writes the groups of its tickets until the job ends; on node 1 it is slower."""
    control, finished, written = connect(address, f"rollout-{worker}"), 0, 0
    with Ring.attach(name) as ring, suppress(JobFailed):
        try:
            while True:
                control.check_job()
                claims = claim_tickets(control, 1)
                for claim in claims:
                    version = control.get_json("test/version")
                    ticket = claim.ticket
                    assert isinstance(version, int)
                    made = group(ticket, worker, successes(ticket), version)
                    for each in made.trajectories:
                        finished += 1
                        now = replace(each, restart_epoch=claim.restart_epoch, finished_at=time.time())
                        ring.write(encode_trajectory(now), 10.0)
                        written += 1
                    control.close_ticket(claim.ticket)
                time.sleep(0.04 * worker + 0.02)
        except JobEnded:
            final = {"instance_id": f"rollout-{worker}.1", "finished": finished, "unwritten": finished - written}
            control.put_json(f"final_counts/rollout-{worker}", final)


def make_run_folder(folder: Path) -> Path:
    """Create the run's folder."""
    run_folder = make_config(str(folder)).run_folder
    run_folder.mkdir(parents=True, exist_ok=True)
    (run_folder / "config.yaml").touch()
    return run_folder
