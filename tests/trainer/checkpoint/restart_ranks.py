"""Rank body of the test of restarts within a job: a trainer without a model that dies repeatedly, and two workers."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from tests.gloo import join
from tests.job_control import claim_tickets, connect, control_service
from tests.trainer.data.sampler_ranks import METRICS
from tests.trajectories import trajectory

UPDATES, GROUPS, AHEAD, SAVE_EVERY, ATTEMPTS = 12, 3, 2, 3, 5
"""The state of every SAVE_EVERY-th version is saved; all attempts but the last die at some update."""


def config_of(folder: str) -> Config:
    """Two workers, one node."""
    config = Config()
    config.run.directory, config.run.name, config.rollout.engines = folder, "restarts", 2
    config.trainer.updates, config.trainer.groups_per_update = UPDATES, GROUPS
    config.rollout.max_staleness = AHEAD
    return config


def run(rank: int, folder: str, seed: int) -> None:
    """Run one job to its end; `found.json` has the resume point of each attempt."""
    join(rank, 1, folder)
    config = config_of(folder)
    config.run_folder.mkdir()
    (config.run_folder / "config.yaml").touch()
    name = f"webrl-test-{secrets.token_hex(4)}"
    with control_service(Path(folder)) as address, Ring.create_or_attach(name, 2**22, name) as ring:
        versions = {"now": 0}
        workers = [
            threading.Thread(target=_work, args=(address, ring, number, versions, seed), daemon=True)
            for number in (0, 1)
        ]
        for worker in workers:
            worker.start()
        try:
            found = _Trainer(config, address, ring, versions, seed).run()
        finally:
            ring.unlink()
        for worker in workers:
            worker.join(60)
    (Path(folder) / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _work(address: Path, ring: Ring, number: int, versions: dict[str, int], seed: int) -> None:
    control, finished, choose = connect(address, f"rollout-{number}"), 0, random.Random(f"{seed}/{number}")
    instance_id = f"rollout-{number}.1"
    try:
        while True:
            control.check_job()
            claims = claim_tickets(control, 1)
            for claim in claims:
                version = versions["now"]
                ticket = claim.ticket
                time.sleep(choose.random() * 0.06)
                for index in range(2):
                    made = trajectory(ticket, index, reward=float(index < (ticket % 5 != 3)), version=version)
                    made = replace(made, worker=instance_id, restart_epoch=claim.restart_epoch, finished_at=time.time())
                    finished += 1
                    ring.write(encode_trajectory(made), 10.0)
                control.close_ticket(claim.ticket)
            time.sleep(0.005)
    except JobEnded:
        report = {"instance_id": instance_id, "finished": finished, "unwritten": 0}
        control.put_json(f"final_counts/rollout-{number}", report)


class _Trainer:
    """Attempts of the trainer. All but the last die before an update is counted, or before its records are freed."""

    def __init__(self, config: Config, address: Path, ring: Ring, versions: dict[str, int], seed: int) -> None:
        self.config, self.address, self.ring, self.versions = config, address, ring, versions
        self.choose = random.Random(seed)
        self.saved: str | None = None

    def run(self) -> list[dict[str, Any]]:
        found = []
        for attempt in range(ATTEMPTS):
            resume_point = self._attempt(last=attempt == ATTEMPTS - 1)
            found.append({
                "version": resume_point.version, "surviving": len(resume_point.surviving_tickets),
                "reissued": len(resume_point.reissued_tickets),
                "rolled_back": resume_point.episodes_rolled_back,
            })  # fmt: skip
        return found

    def _attempt(self, last: bool) -> Any:
        from megatron_webrl.track.metrics import UpdateSeconds
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
        from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
        from megatron_webrl.trainer.coordinator import Coordinator
        from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch
        from megatron_webrl.trainer.telemetry import UpdateResult
        from tests.trainer.multi_node.one_node import one_node_exchange

        control, exchange = connect(self.address, "trainer-0"), one_node_exchange(self.ring)
        folder = self.config.run_folder
        state = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
        if self.saved is not None:
            (folder / "state.json").write_text(self.saved)
            read = read_trainer_state(folder)
            state = replace(read, restart_epoch=read.restart_epoch + 1)
        resume_point = make_resume_point(control, exchange, state, folder, True)
        tracker: Any = _NoTracker()
        coordinator = Coordinator(self.config, control, exchange, state, resume_point, tracker)
        version = self.versions["now"] = state.version
        coordinator.open_job(version)
        end = UPDATES if last else min(UPDATES - 1, version + self.choose.randrange(1, 5))
        while version < UPDATES:
            groups = coordinator.collect(version, lambda: False)
            assert isinstance(groups, list)
            if version == end:
                if self.choose.random() < 0.5:  # counted, but not freed
                    coordinator.group_source.records = _RecordsNeverFreed(exchange)
                    coordinator.close_update(groups, version + 1)
                return resume_point
            coordinator.log_update(
                UpdateResult(version + 1, groups, METRICS, LogprobMismatch({}), UpdateSeconds(1, 1, 1, 1, 0), {})
            )
            version += 1
            coordinator.close_update(groups, version)
            self.versions["now"] = version
            if version % SAVE_EVERY == 0:
                self.saved = json.dumps(asdict(coordinator.trainer_state(version)))
        coordinator.end_job(version, True)
        return resume_point


class _RecordsNeverFreed:
    """Records of a trainer that is killed before it frees them."""

    def __init__(self, records: Any) -> None:
        self.committed, self.read = records.committed, records.read

    def acknowledge(self, sequences: object) -> None: ...


class _NoTracker:
    run_id = "none"
    error = None

    def close(self, status: str) -> None: ...
