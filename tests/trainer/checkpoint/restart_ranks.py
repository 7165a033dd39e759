"""What the process of the test of restarts within a job does: a trainer without a model in many lives, two workers."""

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
from megatron_webrl.control.control_plane import JobEnded, ticket_epoch_at
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from tests.gloo import join
from tests.planes import connect, control_plane
from tests.trainer.data.sampler_ranks import METRICS
from tests.trajectories import trajectory

UPDATES, GROUPS, AHEAD, SAVED, LIVES = 12, 3, 2, 3, 5
"""A state is kept of every SAVED-th version; all lives but the last end somewhere."""


def config_of(folder: str) -> Config:
    """Two workers, one node."""
    config = Config()
    config.run.directory, config.run.name, config.rollout.engines = folder, "restarts", 2
    config.trainer.updates, config.trainer.groups_per_update = UPDATES, GROUPS
    config.rollout.max_staleness, config.tracking.sample_trajectories = AHEAD, 0
    return config


def run(rank: int, folder: str, seed: int) -> None:
    """One job to its end; `found.json` says what each life took over."""
    join(rank, 1, folder)
    config = config_of(folder)
    config.run_folder.mkdir()
    (config.run_folder / "config.yaml").touch()
    name = f"webrl-test-{secrets.token_hex(4)}"
    with control_plane(Path(folder)) as address, Ring.create_or_attach(name, 2**22, name) as ring:
        versions = {"now": 0}
        workers = [
            threading.Thread(target=_work, args=(address, ring, number, versions, seed), daemon=True)
            for number in (0, 1)
        ]
        for worker in workers:
            worker.start()
        try:
            found = _Trainer(config, address, ring, versions, seed).live()
        finally:
            ring.unlink()
        for worker in workers:
            worker.join(60)
    (Path(folder) / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _work(address: tuple[str, int], ring: Ring, number: int, versions: dict[str, int], seed: int) -> None:
    control, finished, choose = connect(address, f"rollout-{number}"), 0, random.Random(f"{seed}/{number}")
    life = f"rollout-{number}.1"
    try:
        while True:
            control.check_job()
            position = control.claim_slot() if control.ticket_epoch_count() else None
            if position is not None:
                starts, version = control.ticket_epochs(), versions["now"]
                ticket = ticket_epoch_at(starts, position).ticket_at(position)
                time.sleep(choose.random() * 0.06)
                for index in range(2):
                    made = trajectory(ticket, index, reward=float(index < (ticket % 5 != 3)), version=version)
                    made = replace(made, worker=life, restart_epoch=starts[-1].restart_epoch, finished_at=time.time())
                    finished += 1
                    ring.write(encode_trajectory(made), 10.0)
                control.close_slot(position)
            time.sleep(0.005)
    except JobEnded:
        control.put_json(f"final_counts/rollout-{number}", {"instance_id": life, "finished": finished, "unwritten": 0})


class _Trainer:
    """Lives of the trainer. All but the last end before the update is counted, or before its records are freed."""

    def __init__(
        self, config: Config, address: tuple[str, int], ring: Ring, versions: dict[str, int], seed: int
    ) -> None:
        self.config, self.address, self.ring, self.versions = config, address, ring, versions
        self.choose = random.Random(seed)
        self.saved: str | None = None

    def live(self) -> list[dict[str, Any]]:
        found = []
        for life in range(LIVES):
            begun = self._life(last=life == LIVES - 1)
            found.append({
                "version": begun.ticket_epoch.version, "survivors": len(begun.surviving_tickets),
                "again": len(begun.ticket_epoch.open_tickets), "lost": begun.episodes_rolled_back,
            })  # fmt: skip
        return found

    def _life(self, last: bool) -> Any:
        from megatron_webrl.tracking.metrics import UpdateSeconds
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
        from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
        from megatron_webrl.trainer.coordinator import Coordinator
        from megatron_webrl.trainer.exchange.record_exchange import SingleNodeExchange
        from megatron_webrl.trainer.logprob_mismatch import LogprobMismatch

        control, rings, folder = (
            connect(self.address, "trainer-0"),
            SingleNodeExchange(self.ring),
            self.config.run_folder,
        )
        state = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
        if self.saved is not None:
            (folder / "state.json").write_text(self.saved)
            read = read_trainer_state(folder)
            state = replace(read, restart_epoch=read.restart_epoch + 1)
        begun = make_resume_point(control, rings, state, folder, True)
        tracker: Any = _NoTracker()
        coordinator = Coordinator(self.config, control, rings, state, begun, tracker)
        version = self.versions["now"] = state.version
        coordinator.open_job(version)
        end = UPDATES if last else min(UPDATES - 1, version + self.choose.randrange(1, 5))
        while version < UPDATES:
            groups = coordinator.collect(version, lambda: False)
            assert isinstance(groups, list)
            if version == end:
                if self.choose.random() < 0.5:  # counted, but not freed
                    coordinator.group_source.records = _Deaf(self.ring)
                    coordinator.close_update(groups, version + 1)
                return begun
            coordinator.log_update(
                version + 1, groups, METRICS, LogprobMismatch(None, 0), UpdateSeconds(1, 1, 1, 1, 0), {}
            )
            version += 1
            coordinator.close_update(groups, version)
            self.versions["now"] = version
            if version % SAVED == 0:
                self.saved = json.dumps(asdict(coordinator._state(version)))
        coordinator.end_job(version)
        return begun


class _Deaf:
    """A ring that frees nothing any more: its trainer was killed a moment before."""

    def __init__(self, ring: Ring) -> None:
        self.committed, self.read = ring.committed, ring.read

    def acknowledge(self, sequences: object) -> None: ...


class _NoTracker:
    run_id = "none"

    def log_update(self, *arguments: object) -> None: ...

    def close(self, status: str) -> None: ...
