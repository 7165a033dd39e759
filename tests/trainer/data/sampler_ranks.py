"""Process of the task sampling test, in which a coordinator and a worker alternate.

The worker runs several tickets at a time and finishes the oldest at every poll of the trainer, so the order of groups
does not depend on the machine. An episode succeeds at random, seeded by its task.
"""

from __future__ import annotations

import json
import random
import secrets
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.control.client import TicketClaim
from megatron_webrl.tasks.sampler import knowledge, samplers
from megatron_webrl.tasks.source import referenced_task
from tests.gloo import join
from tests.job_control import claim_tickets, connect, control_service
from tests.trajectories import trajectory

SKILL = {"click-test": 0.98, "click-tab": 0.5, "enter-text": 0.1, "focus-text": 0.8, "click-link": 0.02}
UPDATES, GROUP, IN_FLIGHT = 12, 4, 8
TOKEN_TOTALS = ("response_tokens", "success_tokens", "entropy", "success_entropy", "tokens")
METRICS = dict.fromkeys((*TOKEN_TOTALS, "loss", "gradient_norm", "gradient_clipped", "learning_rate"), 1.0)


def run(rank: int, folder: str) -> None:
    """A run without interruption, and one that is resumed twice; for each sampler that has a state."""
    join(rank, 1, folder)
    from megatron_webrl.trainer.data import group_source

    group_source.POLL_SECONDS = 0.001
    found = {}
    for name in ("curriculum", "near_target"):
        for label, ends in (("whole", ()), ("resumed", (4, 8))):
            found[name, label] = _Run(Path(folder), f"{name}-{label}", name).run(ends)
    torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


class _Run:
    """One run, with restarts from checkpoints."""

    def __init__(self, folder: Path, name: str, sampler: str) -> None:
        from megatron_webrl.tasks.miniwob import MiniWobTaskSource

        self.config = Config()
        self.config.run.directory, self.config.run.name, self.config.run.seed = str(folder), name, 5
        self.config.tasks.environments, self.config.tasks.sampler.name = list(SKILL), sampler
        self.config.trainer.updates, self.config.trainer.groups_per_update = UPDATES, 3
        # Many tickets in flight and fast estimates: a ticket that changed its state would change its task.
        knowledge.LATEST_GROUP_WEIGHT, self.config.rollout.max_staleness = 0.8, 4
        self.config.tracking.keep_records = True
        self.config.run_folder.mkdir()
        (self.config.run_folder / "config.yaml").touch()
        self.folder = folder
        self.source = MiniWobTaskSource(list(SKILL), TasksConfig(max_steps=4, sampler=self.config.tasks.sampler))
        self.tasks: dict[int, set[str]] = {}  # ticket -> its task ids
        self.versions: dict[int, int] = {}  # ticket -> policy version at its draw
        self.drawn: dict[int, str] = {}  # ticket -> environment
        self.expected = torch.zeros(len(SKILL), dtype=torch.float64)  # expected draws of each environment
        self.open: list[tuple[int, ...]] = []  # open tickets at each restart

    def run(self, ends: Iterable[int]) -> dict[str, Any]:
        """Run to the end, with a restart from a checkpoint after each of the versions `ends`."""
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState

        state = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
        found: dict[str, Any] = {}
        with self.source:
            for end in (*ends, UPDATES):
                if state.version:
                    state = self._stored(state)
                    self.open.append(state.open_tickets)
                state, found = self._run_until(state, end)
        updates = [json.loads(line) for line in (self.config.run_folder / "updates.jsonl").read_text().splitlines()]
        return found | {
            "tasks": self.tasks, "expected": self.expected, "drawn": self.drawn, "open": self.open,
            "versions": self.versions,
            "base": state.closed_tickets, "rates": found["rates"], "figures": updates[-1]["extra"],
        }  # fmt: skip

    def _stored(self, state: Any) -> Any:
        """The state as the next restart epoch reads it from a checkpoint."""
        from megatron_webrl.trainer.checkpoint.checkpointer import read_trainer_state

        (self.config.run_folder / "state.json").write_text(json.dumps(asdict(state)))
        read = read_trainer_state(self.config.run_folder)
        return replace(read, restart_epoch=read.restart_epoch + 1)

    def _run_until(self, state: Any, end: int) -> tuple[Any, dict[str, Any]]:
        """Train up to version `end`, with a new control service and ring. Unfinished groups are lost."""
        from megatron_webrl.ring.ring import Ring
        from megatron_webrl.track.metrics import UpdateSeconds
        from megatron_webrl.track.mlflow_upload import MLflowTracker
        from megatron_webrl.trainer import coordinator as coordinators
        from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
        from megatron_webrl.trainer.coordinator import Coordinator
        from megatron_webrl.trainer.data import replay_buffer
        from megatron_webrl.trainer.metrics.logprob_mismatch import LagMismatch, LogprobMismatch
        from megatron_webrl.trainer.telemetry import UpdateResult
        from tests.trainer.multi_node.one_node import one_node_exchange
        from tools.bench import recorded_groups

        ring_name = f"webrl-test-{secrets.token_hex(4)}"
        with ExitStack() as stack:
            address = stack.enter_context(control_service(self.folder))
            ring = Ring.create_or_attach(ring_name, 2**21, ring_name)
            stack.callback(ring.close)
            stack.callback(ring.unlink)
            control = connect(address, "trainer-0")
            tracker = MLflowTracker(self.config)
            exchange = one_node_exchange(ring)
            coordinator = Coordinator(
                self.config,
                control,
                exchange,
                state,
                make_resume_point(control, exchange, state, self.config.run_folder, True),
                tracker,
            )
            assert coordinator.task_sampler is not None
            coordinator.task_sampler.draw = self._recorded(coordinator.task_sampler, coordinator.task_sampler.draw)
            coordinator.open_job(state.version)
            worker = _Worker(self, address, ring, coordinator)
            version, trained = state.version, []
            while version < end:
                groups = coordinator.collect(version, lambda: worker.step(version))  # noqa: B023
                version += 1
                if version == end:
                    mismatch = LogprobMismatch({1: LagMismatch(4, 0.2, 0.9, 1.0, 0.5)})
                    with mock.patch.object(coordinators.log, "warning") as warning:
                        coordinator.log_update(
                            UpdateResult(version, groups, METRICS, mismatch, UpdateSeconds(1, 1, 1, 1, 0), {})
                        )
                    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
                    trained = [(g.ticket, [t.index for t in g.trajectories]) for g in groups]
                coordinator.close_update(groups, version)
            sampler = coordinator.task_sampler
            stored = recorded_groups.read_groups(replay_buffer.group_file_path(self.config.records_folder, end - 1))
            kept = [(g.ticket, [t.index for t in g.trajectories]) for g in stored]
            return coordinator.trainer_state(version), {
                "rates": {name: sampler.pass_rate(name) for name in SKILL}, "kept_tasks": len(sampler.tasks),
                "trained": trained, "kept": kept, "warned": warned,
            }  # fmt: skip

    def _recorded(self, sampler: Any, draw: Any) -> Any:
        """Record by which probabilities and at which version each ticket is drawn for the first time."""

        def recorded(tickets: list[int], version: int) -> Any:
            probabilities = samplers.environment_probabilities(
                self.config.tasks.sampler, list(SKILL), [], sampler.knowledge
            )
            drawn = draw(tickets, version)
            for ticket, task in drawn.items():
                if ticket not in self.versions:
                    self.expected += torch.tensor(probabilities, dtype=torch.float64)
                    self.versions[ticket], self.drawn[ticket] = version, task.environment
            return drawn

        return recorded


class _Worker:
    """Runs tickets in order, several at a time."""

    def __init__(self, run: _Run, address: Path, ring: Any, coordinator: Any) -> None:
        self.run, self.ring, self.coordinator = run, ring, coordinator
        self.control = connect(address, "rollout-0")
        self.in_flight: deque[list[Any]] = deque()

    def step(self, version: int) -> bool:
        """Claim tickets, and finish one if the trainer lacks groups."""
        for claim in claim_tickets(self.control, IN_FLIGHT - len(self.in_flight)):
            self.in_flight.append(self._run_ticket(claim, version))
        if len(self.coordinator.group_source._ready) < self.run.config.trainer.groups_per_update:
            self.coordinator.control.check_job()
            for each in self.in_flight.popleft():
                from megatron_webrl.ring.record import encode_trajectory

                self.ring.write(encode_trajectory(each), 10.0)
        return False

    def _run_ticket(self, claim: TicketClaim, version: int) -> list[Any]:
        ticket, task = claim.ticket, referenced_task(self.run.source, claim.task)
        self.run.tasks.setdefault(ticket, set()).add(task.id)
        chance = random.Random(task.id)
        rewards = [float(chance.random() < SKILL[task.environment]) for _ in range(GROUP)]
        made = [
            trajectory(ticket, i, reward=r, version=version, group_size=GROUP, restart_epoch=claim.restart_epoch)
            for i, r in enumerate(rewards)
        ]
        return [replace(each, task=task) for each in made]
