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

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.tracking import summary
from megatron_webrl.tracking.episode_log import EpisodeLog
from megatron_webrl.tracking.metrics import (
    UpdateMetrics,
    UpdateSeconds,
    episode_metrics,
    mean,
    mean_response_tokens,
)
from megatron_webrl.tracking.mlflow_run import MLflowTracker, sample_across_outcomes
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
from megatron_webrl.trainer.checkpoint.resume_point import ResumePoint
from megatron_webrl.trainer.data import group_files
from megatron_webrl.trainer.data.group_source import GroupSource
from megatron_webrl.trainer.data.task_sampler import TaskSampler
from megatron_webrl.trainer.engine_utilization import EngineUtilization
from megatron_webrl.trainer.exchange.multi_node_exchange import MultiNodeExchange
from megatron_webrl.trainer.exchange.record_exchange import CollectInterrupt, SelectedGroups, SingleNodeExchange
from megatron_webrl.trainer.learner import Learner, Metrics
from megatron_webrl.trainer.logprob_mismatch import LogprobMismatch
from megatron_webrl.trainer.rewards import has_penalties, reward_function
from megatron_webrl.types import Group

log = logging.getLogger(__name__)

FINAL_REPORT_TIMEOUT_SECONDS = 60.0
PER_TOKEN_METRICS = (
    "dual_clipped",
    "importance_weight_capped",
    "policy_ratio",
    "behaviour_importance_weight",
    "approx_kl",
    "reference_kl",
)


class Coordinator:
    """Life: open_job, then per update collect, record, close and perhaps checkpoint; finish at the end."""

    def __init__(
        self,
        config: Config,
        control: ControlClient,
        exchange: SingleNodeExchange | MultiNodeExchange,
        state: TrainerState,
        resume_point: ResumePoint,
        tracker: MLflowTracker | None,
        on_ready: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """`tracker` is the first rank's; `state` is a fresh run's or the checkpoint's, from which it begins.

        `on_ready` is told on the first rank of groups that wait to be trained.
        """
        self.config, self.control, self.exchange, self.tracker = config, control, exchange, tracker
        self.accounting = Accounting.from_state_dict(state.accounting)
        self.resume_point, self.ticket_epoch = resume_point, resume_point.ticket_epoch
        self.tickets_dropped_before = state.dropped_tickets
        self.updates = list(state.updates)
        self.task_sampler = TaskSampler(
            config.tasks, self.ticket_epoch.next_ticket, resume_point.unclosed_tickets, state.task_sampler
        )
        self.episode_log = None
        if self.is_first_rank:
            self.episode_log = EpisodeLog(config.run_folder, self.accounting.closed_episodes)
            summary.write_updates(config.run_folder, self.updates)  # without those that are made again
        self.group_source = GroupSource(
            exchange.record_source,
            config,
            resume_point,
            self.accounting,
            self.task_sampler.record_group,
            self.episode_log,
            on_ready,
        )
        self.checkpoints = Checkpointer(
            config.run_folder / "checkpoints",
            Path(config.model.path),
            config.trainer.checkpoint,
            control.report_progress,
        )
        self.utilization = EngineUtilization(control, config.worker_names)
        self._sequences: dict[int, list[int]] = {}
        self._limit = -1

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that talks."""
        return self.tracker is not None

    def open_job(self, version: int) -> None:
        """Let the workers take tickets."""
        if self.is_first_rank:
            self._limit = self._ticket_limit(version, self._ahead)
            self.task_sampler.publish_initial_states(self.control)
            self.control.start_ticket_epoch(self.ticket_epoch, self._limit)
            self.utilization.pop_metrics()

    def open_next_batch(self, version: int) -> None:
        """Let the workers begin the batch of the update after that from `version` on (mode one_step_off)."""
        if self.is_first_rank:
            self._raise_limit(version, 1)

    def collect(self, version: int, has_new_engines: Callable[[], bool]) -> list[Group] | CollectInterrupt:
        """The groups of the next update, on every rank, or what is to be done first.

        `newcomers` is asked on the first rank. Raises TimeoutError or JobFailed.
        """
        chosen: SelectedGroups | CollectInterrupt | None = None
        if self.is_first_rank:
            count, seconds = self.config.trainer.groups_per_update, self.config.trainer.batch_timeout_seconds
            taken = self.group_source.wait_for_groups(
                version, count, seconds, lambda ready: self._go_on(version, ready, has_new_engines)
            )
            if taken is not None:
                chosen = taken
                self._sequences = {group.ticket: sequences for group, sequences in taken}
            else:
                chosen = CollectInterrupt.STOP if self.control.stop_requested() else CollectInterrupt.NEW_ENGINES
        groups = self.exchange.broadcast_groups(chosen)
        if isinstance(groups, CollectInterrupt):
            return groups
        self.control.report_status(f"update {version + 1}: training on {len(groups)} groups{self._trouble()}")
        return groups

    def log_update(
        self,
        version: int,
        groups: Sequence[Group],
        metrics: Metrics,
        mismatch: LogprobMismatch,
        seconds: UpdateSeconds,
        weight_sync_metrics: dict[str, float],
    ) -> None:
        """Write the figures of the update that made `version` to updates.jsonl and MLflow; keep its groups if wanted.

        Collective. `transfer`: those of the weights' way to the engines, by their MLflow names.
        """
        shown = [t for g in groups for t in g.trajectories if t.steps]
        pages = self.exchange.gather_with_images(
            sample_across_outcomes(shown, self.config.tracking.sample_trajectories)
        )
        if self.config.tracking.keep_records and self.exchange.writes_node_files:
            path = group_files.group_file_path(self.config.records_folder, version - 1, self.exchange.topology.node)
            group_files.write_trajectories(path, self.exchange.trajectories_to_store(groups))
        if self.tracker is None:
            return
        trajectories = [t for g in groups for t in g.trajectories if t.trainable]
        oldest = map(self.group_source.oldest_version, trajectories)
        staleness = [version - 1 - each for each in oldest if each is not None]
        tokens = max(1.0, metrics["response_tokens"])
        rates: dict[str, float] = {
            "loss": metrics["loss"],
            "gradient_norm": metrics["gradient_norm"],
            "learning_rate": metrics["learning_rate"],
            "entropy": metrics["entropy"] / tokens,
        }
        rates |= {name: metrics[name] / tokens for name in PER_TOKEN_METRICS if name in metrics}
        if self.config.trainer.loss.raft_versions:
            rates["replayed_trajectories"] = metrics["replayed"]
        if has_penalties(self.config):
            rates["reward_shaped_mean"] = mean([*map(reward_function(self.config), trajectories)])
        update = UpdateMetrics(
            version=version,
            groups=len(groups),
            reward_mean=mean([t.reward for t in trajectories]),
            steps_mean=mean([len(t.steps) for t in trajectories]),
            response_tokens_mean=mean_response_tokens([s for t in trajectories for s in t.steps]),
            staleness_mean=mean(staleness),
            staleness_max=max(staleness, default=0),
            clip_fraction=metrics.get("clipped", 0.0) / tokens,
            logprob_mismatch_max=mismatch.largest,
            logprob_mismatch_tokens=mismatch.tokens,
            tokens_per_second=metrics["tokens"] / (seconds.wait + seconds.train + seconds.sync),
            seconds=seconds,
            finished_at=time.time(),
            extra=rates
            | episode_metrics(groups)
            | self.checkpoints.pop_metrics()
            | weight_sync_metrics
            | self.exchange.pop_metrics()
            | self.group_source.pop_metrics()
            | self.task_sampler.metrics()
            | self.utilization.pop_metrics()
            | self.accounting.wasted_token_shares()
            | {f"dropped/{k}": float(v) for k, v in self.accounting.dropped.items()},
        )
        self.updates.append(update.to_json())
        summary.write_updates(self.config.run_folder, self.updates)
        self.tracker.log_update(update, pages)

    def close_update(self, groups: Sequence[Group], version: int) -> None:
        """Count the trained groups, free their records, and let the workers take more tickets."""
        if self.is_first_rank:
            for group in groups:
                self.group_source.close_group(group, self._sequences.pop(group.ticket))
            self._raise_limit(version, self._ahead)

    def checkpoint_if_due(self, learner: Learner, version: int) -> None:
        """Complete a checkpoint that has been written, and start one of `version` if it is due. Collective."""
        every = self.config.trainer.checkpoint.every
        self.checkpoints.poll()
        if every and version % every == 0:
            self.control.report_status(f"starting checkpoint {version}{self._trouble()}")
            self.checkpoints.start_save(learner, self._state(version))

    def final_checkpoint(self, learner: Learner, version: int) -> None:
        """Have a complete checkpoint of `version`, or try. Collective."""
        self.control.report_status(f"writing checkpoint {version}{self._trouble()}")
        self.checkpoints.wait_for_save()
        if self.checkpoints.last_completed is None or self.checkpoints.last_completed[0] != version:
            self.checkpoints.start_save(learner, self._state(version))
        self.checkpoints.close()

    def end_job(self, version: int) -> None:
        """End the job in good order: workers stop, the last records are counted, the summary is written. Collective.

        Raises JobFailed after that if the final checkpoint could not be written.
        """
        if self.tracker is not None:
            outcome = "finished" if version >= self.config.trainer.updates else self.control.requested_outcome()
            with self.control.keep_alive():
                self.control.end_job(outcome)
                self._account(outcome, version)
            self.tracker.close("FINISHED" if outcome == "finished" else "KILLED")
        else:
            self.exchange.finish_collecting()
        torch.distributed.barrier()
        if self.checkpoints.last_error is not None:
            raise JobFailed(f"the final checkpoint, of version {version}, is missing: {self.checkpoints.last_error}")

    def _account(self, outcome: str, version: int) -> None:
        """Count what has come from all workers, who have stopped, and write the summary."""
        deadline = time.monotonic() + FINAL_REPORT_TIMEOUT_SECONDS
        final = dict(filter(None, (self._final_report(worker, deadline) for worker in self.config.worker_names)))
        self.group_source.poll(version)
        self.exchange.finish_collecting()
        # A worker that died gave no account: what it finished is what came out of the ring.
        arrived = self.group_source.episodes_by_worker + Counter(self.resume_point.episodes_counted)
        died = sum(count for life, count in arrived.items() if life not in final)
        finished = (
            self.resume_point.episodes_closed_before + died + sum(report["finished"] for report in final.values())
        )
        waiting = self.group_source.waiting_episodes() + sum(report["unwritten"] for report in final.values())
        accounting = self.accounting.summary(finished, waiting, self.resume_point.episodes_rolled_back)
        if not accounting["matches"]:
            log.error("the accounting does not match: %s", accounting)
        summary.write_summary(self.config.run_folder, outcome, accounting)
        if self.episode_log is not None:
            self.episode_log.close()

    def _go_on(self, version: int, ready: int, newcomers: Callable[[], bool]) -> bool:
        self.control.check_job()
        self._raise_limit(version, self._ahead)
        count = self.config.trainer.groups_per_update
        dropped = self.accounting.format_dropped()
        self.control.report_status(
            f"update {version + 1}: waiting for groups, {ready} of {count}; dropped so far: {dropped}{self._trouble()}"
        )
        return not self.control.stop_requested() and not newcomers()

    def _trouble(self) -> str:
        """What the status line says of checkpoints: nothing while they succeed."""
        failures, trouble = self.checkpoints.failures, self.checkpoints.last_error
        return f"; {failures} checkpoints failed, the last: {trouble}" if trouble else ""

    @property
    def _ahead(self) -> int:
        """Updates whose groups may be begun before their turn, while groups are collected."""
        return self.config.rollout.max_staleness if self.config.rollout.mode == "async" else 0

    def _raise_limit(self, version: int, ahead: int) -> None:
        limit = self._ticket_limit(version, ahead)
        if limit != self._limit:
            self.task_sampler.publish_adapted_state(self.control, self.ticket_epoch.next_ticket_at(self._limit))
            self._limit = limit
            self.control.set_ticket_limit(limit)

    def _ticket_limit(self, version: int, ahead: int) -> int:
        if version >= self.config.trainer.updates:
            return max(self._limit, self.ticket_epoch.first_slot)  # no more groups are wanted
        count = self.config.trainer.groups_per_update
        closed = (version - self.ticket_epoch.version) * count + self.group_source.dropped_tickets
        return self.resume_point.ticket_limit(closed, ahead, count)

    def _state(self, version: int) -> TrainerState:
        taken = self.control.claimed_slots() if self.is_first_rank else self.ticket_epoch.first_slot
        base, open_tickets = self.resume_point.checkpoint_tickets(taken, self.group_source.closed_tickets)
        return TrainerState(
            version=version,
            restart_epoch=self.ticket_epoch.restart_epoch,
            closed_tickets=base,
            open_tickets=open_tickets,
            accounting=self.accounting.state_dict(),
            dropped_tickets=self.tickets_dropped_before + self.group_source.dropped_tickets,
            mlflow_run_id=self.tracker.run_id if self.tracker else None,
            updates=self.updates,
            task_sampler=self.task_sampler.state_dict(),
        )

    def _final_report(self, worker: str, deadline: float) -> tuple[str, dict[str, int]] | None:
        """What the last life of a worker counted, with its name; None if it gave no account until the deadline."""
        while (report := self.control.get_json(f"final_counts/{worker}")) is None:
            if self.control.is_lost(worker) or time.monotonic() > deadline:
                log.warning("%s gave no final account; what came from it is counted", worker)
                return None
            time.sleep(0.05)
        assert isinstance(report, dict)
        return report.pop("instance_id"), report
