"""Everything of the trainer that is not arithmetic: groups in, tickets out, accounts, records, checkpoints.

Every rank has one; the first rank's talks to the control plane and the ring, the others follow it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_webrl.config import Config
from megatron_webrl.control import Control, JobFailed
from megatron_webrl.tracking import summary
from megatron_webrl.tracking.episode_log import EpisodeLog
from megatron_webrl.tracking.metrics import (
    Seconds,
    UpdateRecord,
    episode_metrics,
    mean,
    response_tokens,
)
from megatron_webrl.tracking.mlflow_run import Tracker, varied
from megatron_webrl.trainer import group_files
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.beginning import Beginning
from megatron_webrl.trainer.checkpoint import Checkpoints, TrainerState
from megatron_webrl.trainer.groups import GroupSource
from megatron_webrl.trainer.learner import Learner, Metrics
from megatron_webrl.trainer.node_rings import NodeRings
from megatron_webrl.trainer.rewards import penalised, reward_function
from megatron_webrl.trainer.score import Gap
from megatron_webrl.trainer.sharing import Chosen, Interruption, OneRing
from megatron_webrl.trainer.task_sampler import TaskSampler
from megatron_webrl.trainer.utilization import Utilization
from megatron_webrl.types import Group

log = logging.getLogger(__name__)

FINAL_SECONDS = 60.0
PER_TOKEN = ("dual_clipped", "capped", "importance_weight", "behaviour_weight", "kl", "reference_kl")


class Coordinator:
    """Life: open_job, then per update collect, record, close and perhaps checkpoint; finish at the end."""

    def __init__(
        self,
        config: Config,
        control: Control,
        rings: OneRing | NodeRings,
        state: TrainerState,
        beginning: Beginning,
        tracker: Tracker | None,
        on_ready: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """`tracker` is the first rank's; `state` is a fresh run's or the checkpoint's, from which it begins.

        `on_ready` is told on the first rank of groups that wait to be trained.
        """
        self.config, self.control, self.rings, self.tracker = config, control, rings, tracker
        self.accounting = Accounting.from_state(state.accounting)
        self.beginning, self.start = beginning, beginning.start
        self.dropped_before = state.dropped_tickets
        self.updates = list(state.updates)
        self.sampler = TaskSampler(config.tasks, self.start.fresh, beginning.open, state.sampler)
        self.episodes = None
        if self.first:
            self.episodes = EpisodeLog(config.run_folder, self.accounting.closed)
            summary.write_updates(config.run_folder, self.updates)  # without those that are made again
        self.source = GroupSource(
            rings.records, config, beginning, self.accounting, self.sampler.note, self.episodes, on_ready
        )
        self.checkpoints = Checkpoints(
            config.run_folder / "checkpoints", Path(config.model.path), config.trainer.checkpoint, control.mark
        )
        self.utilization = Utilization(control, config.workers)
        self._sequences: dict[int, list[int]] = {}
        self._limit = -1

    @property
    def first(self) -> bool:
        """Whether this is the rank that talks."""
        return self.tracker is not None

    def open_job(self, version: int) -> None:
        """Let the workers take tickets."""
        if self.first:
            self._limit = self._ticket_limit(version, self._ahead)
            self.sampler.open(self.control)
            self.control.open_job(self.start, self._limit)
            self.utilization.take()

    def open_next(self, version: int) -> None:
        """Let the workers begin the batch of the update after that from `version` on (mode one_step_off)."""
        if self.first:
            self._raise_limit(version, 1)

    def collect(self, version: int, newcomers: Callable[[], bool]) -> list[Group] | Interruption:
        """The groups of the next update, on every rank, or what is to be done first.

        `newcomers` is asked on the first rank. Raises TimeoutError or JobFailed.
        """
        chosen: Chosen | Interruption | None = None
        if self.first:
            count, seconds = self.config.trainer.groups_per_update, self.config.trainer.batch_seconds
            taken = self.source.take(version, count, seconds, lambda ready: self._go_on(version, ready, newcomers))
            if taken is not None:
                chosen = taken
                self._sequences = {group.ticket: sequences for group, sequences in taken}
            else:
                chosen = Interruption.STOP if self.control.stop_requested() else Interruption.NEWCOMERS
        groups = self.rings.share(chosen)
        if isinstance(groups, Interruption):
            return groups
        self.control.report(f"update {version + 1}: training on {len(groups)} groups{self._trouble()}")
        return groups

    def record(
        self,
        version: int,
        groups: Sequence[Group],
        metrics: Metrics,
        gap: Gap,
        seconds: Seconds,
        transfer: dict[str, float],
    ) -> None:
        """Write the figures of the update that made `version` to updates.jsonl and MLflow; keep its groups if wanted.

        Collective. `transfer`: those of the weights' way to the engines, by their MLflow names.
        """
        shown = [t for g in groups for t in g.trajectories if t.steps]
        pages = self.rings.pages(varied(shown, self.config.tracking.sample_trajectories))
        if self.config.tracking.keep_records and self.rings.stores:
            path = group_files.path_of(self.config.records_folder, version - 1, self.rings.nodes.node)
            group_files.write(path, self.rings.stored_here(groups))
        if self.tracker is None:
            return
        trajectories = [t for g in groups for t in g.trajectories if t.trainable]
        oldest = map(self.source.oldest_version, trajectories)
        staleness = [version - 1 - each for each in oldest if each is not None]
        tokens = max(1.0, metrics["response_tokens"])
        rates: dict[str, float] = {
            "loss": metrics["loss"],
            "gradient_norm": metrics["gradient_norm"],
            "learning_rate": metrics["learning_rate"],
            "entropy": metrics["entropy"] / tokens,
        }
        rates |= {name: metrics[name] / tokens for name in PER_TOKEN if name in metrics}
        if self.config.trainer.loss.raft_versions:
            rates["replayed_trajectories"] = metrics["replayed"]
        if penalised(self.config):
            rates["reward_shaped_mean"] = mean([*map(reward_function(self.config), trajectories)])
        update = UpdateRecord(
            version=version,
            groups=len(groups),
            reward_mean=mean([t.reward for t in trajectories]),
            steps_mean=mean([len(t.steps) for t in trajectories]),
            response_tokens_mean=response_tokens([s for t in trajectories for s in t.steps]),
            staleness_mean=mean(staleness),
            staleness_max=max(staleness, default=0),
            clip_fraction=metrics.get("clipped", 0.0) / tokens,
            logprob_gap_max=gap.largest,
            logprob_gap_tokens=gap.tokens,
            tokens_per_second=metrics["tokens"] / (seconds.wait + seconds.train + seconds.sync),
            seconds=seconds,
            finished_at=time.time(),
            extra=rates
            | episode_metrics(groups)
            | self.checkpoints.take_figures()
            | transfer
            | self.rings.take_figures()
            | self.source.take_figures()
            | self.sampler.figures()
            | self.utilization.take()
            | self.accounting.waste()
            | {f"dropped/{k}": float(v) for k, v in self.accounting.dropped.items()},
        )
        self.updates.append(update.to_json())
        summary.write_updates(self.config.run_folder, self.updates)
        self.tracker.log_update(update, pages)

    def close(self, groups: Sequence[Group], version: int) -> None:
        """Count the trained groups, free their records, and let the workers take more tickets."""
        if self.first:
            for group in groups:
                self.source.close_group(group, self._sequences.pop(group.ticket))
            self._raise_limit(version, self._ahead)

    def checkpoint(self, learner: Learner, version: int) -> None:
        """Complete a checkpoint that has been written, and start one of `version` if it is due. Collective."""
        every = self.config.trainer.checkpoint.every
        self.checkpoints.poll()
        if every and version % every == 0:
            self.control.report(f"starting checkpoint {version}{self._trouble()}")
            self.checkpoints.begin(learner, self._state(version))

    def final_checkpoint(self, learner: Learner, version: int) -> None:
        """Have a complete checkpoint of `version`, or try. Collective."""
        self.control.report(f"writing checkpoint {version}{self._trouble()}")
        self.checkpoints.finish()
        if self.checkpoints.newest is None or self.checkpoints.newest[0] != version:
            self.checkpoints.begin(learner, self._state(version))
        self.checkpoints.close()

    def finish(self, version: int) -> None:
        """End the job in good order: workers stop, the last records are counted, the summary is written. Collective.

        Raises JobFailed after that if the final checkpoint could not be written.
        """
        if self.tracker is not None:
            outcome = "finished" if version >= self.config.trainer.updates else self.control.stop_outcome()
            with self.control.held():
                self.control.finish(outcome)
                self._account(outcome, version)
            self.tracker.close("FINISHED" if outcome == "finished" else "KILLED")
        else:
            self.rings.end()
        torch.distributed.barrier()
        if self.checkpoints.trouble is not None:
            raise JobFailed(f"the final checkpoint, of version {version}, is missing: {self.checkpoints.trouble}")

    def _account(self, outcome: str, version: int) -> None:
        """Count what has come from all workers, who have stopped, and write the summary."""
        deadline = time.monotonic() + FINAL_SECONDS
        final = dict(filter(None, (self._final_report(worker, deadline) for worker in self.config.workers)))
        self.source.poll(version)
        self.rings.end()
        # A worker that died gave no account: what it finished is what came out of the ring.
        arrived = self.source.arrived + Counter(self.beginning.counted)
        died = sum(count for life, count in arrived.items() if life not in final)
        finished = self.beginning.closed + died + sum(report["finished"] for report in final.values())
        waiting = self.source.waiting() + sum(report["held"] for report in final.values())
        accounting = self.accounting.summary(finished, waiting, self.beginning.rolled_back)
        if not accounting["matches"]:
            log.error("the accounting does not match: %s", accounting)
        summary.write(self.config.run_folder, outcome, accounting)
        if self.episodes is not None:
            self.episodes.close()

    def _go_on(self, version: int, ready: int, newcomers: Callable[[], bool]) -> bool:
        self.control.check()
        self._raise_limit(version, self._ahead)
        count = self.config.trainer.groups_per_update
        dropped = self.accounting.dropped_line()
        self.control.report(
            f"update {version + 1}: waiting for groups, {ready} of {count}; dropped so far: {dropped}{self._trouble()}"
        )
        return not self.control.stop_requested() and not newcomers()

    def _trouble(self) -> str:
        """What the status line says of checkpoints: nothing while they succeed."""
        failures, trouble = self.checkpoints.failures, self.checkpoints.trouble
        return f"; {failures} checkpoints failed, the last: {trouble}" if trouble else ""

    @property
    def _ahead(self) -> int:
        """Updates whose groups may be begun before their turn, while groups are collected."""
        return self.config.rollout.max_staleness if self.config.rollout.mode == "async" else 0

    def _raise_limit(self, version: int, ahead: int) -> None:
        limit = self._ticket_limit(version, ahead)
        if limit != self._limit:
            self.sampler.adapt(self.control, self.start.fresh_at(self._limit))
            self._limit = limit
            self.control.set_limit(limit)

    def _ticket_limit(self, version: int, ahead: int) -> int:
        if version >= self.config.trainer.updates:
            return max(self._limit, self.start.first)  # no more groups are wanted
        count = self.config.trainer.groups_per_update
        closed = (version - self.start.version) * count + self.source.dropped_tickets
        return self.beginning.limit(closed, ahead, count)

    def _state(self, version: int) -> TrainerState:
        taken = self.control.taken() if self.first else self.start.first
        base, open_tickets = self.beginning.tickets_at(taken, self.source.closed)
        return TrainerState(
            version=version,
            incarnation=self.start.incarnation,
            base=base,
            open_tickets=open_tickets,
            accounting=self.accounting.state(),
            dropped_tickets=self.dropped_before + self.source.dropped_tickets,
            mlflow_run=self.tracker.run_id if self.tracker else None,
            updates=self.updates,
            sampler=self.sampler.state(),
        )

    def _final_report(self, worker: str, deadline: float) -> tuple[str, dict[str, int]] | None:
        """What the last life of a worker counted, with its name; None if it gave no account until the deadline."""
        while (report := self.control.value(f"final/{worker}")) is None:
            if self.control.is_lost(worker) or time.monotonic() > deadline:
                log.warning("%s gave no final account; what came from it is counted", worker)
                return None
            time.sleep(0.05)
        assert isinstance(report, dict)
        return report.pop("life"), report
