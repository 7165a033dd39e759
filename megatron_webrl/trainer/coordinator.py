"""Each trainer rank's groups, tickets, accounting, logs and checkpoints; only the first calls the control service."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient, ticket_limit
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.judge.budget import restore_usage, save_usage
from megatron_webrl.tasks.files.table import TASK_FILES, task_file_digests
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.track import summary
from megatron_webrl.track.episodes import EpisodeLog
from megatron_webrl.track.evaluations import EvaluationLog
from megatron_webrl.track.metrics import (
    UpdateMetrics,
    episode_metrics,
    mean,
    mean_response_tokens,
    step_metrics,
)
from megatron_webrl.track.run_lock import Launch, LaunchLost
from megatron_webrl.trainer.accounting import DAMAGED_COUNTER, Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.credit.rewards import outcome_reward, reward_function
from megatron_webrl.trainer.data.group_source import GroupSource
from megatron_webrl.trainer.data.replay_buffer import group_file_path, write_trajectories
from megatron_webrl.trainer.data.task_sampler import TaskSampler
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.metrics.group_statistics import credit_metrics
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from megatron_webrl.trainer.multi_node.exchange import CollectInterrupt, RecordExchange, SelectedGroups
from megatron_webrl.trainer.telemetry import EngineUtilization, UpdateResult
from megatron_webrl.types import Group, TaskReference
from megatron_webrl.util.atomic_file import continue_without
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.history import History
from megatron_webrl.util.text import metric_label

if TYPE_CHECKING:
    from megatron_webrl.track.upload import Tracker

log = logging.getLogger(__name__)

FINAL_REPORT_TIMEOUT_SECONDS = 60.0
LAUNCH_CHECK_SECONDS = 1.0  # between two looks for a launch that has taken over


class Coordinator:
    """Hands groups to the loop, and does the bookkeeping of each update.

    Life cycle: open_job; per update collect, log_update, close_update, checkpoint_if_due; final_checkpoint; end_job.
    """

    def __init__(
        self,
        config: Config,
        control: ControlClient,
        exchange: RecordExchange,
        state: TrainerState,
        resume_point: ResumePoint,
        tracker: Tracker | None,
        launch: Launch | None = None,
    ) -> None:
        """`state`: that of the checkpoint to go on from, or a new one. `tracker`: None except on the first rank.

        `launch`: of the run, if it has one.
        """
        self.config, self.control, self.exchange, self.tracker = config, control, exchange, tracker
        self._launch, self._launch_checked_at = launch, -math.inf
        self.accounting = Accounting.from_state_dict(state.accounting)
        self.resume_point = resume_point
        self.tickets_dropped_before = state.dropped_tickets
        self._resumed_version = state.version if state.restart_epoch else None  # of a checkpoint of this run
        self.task_sampler: TaskSampler | None = None
        self.episode_log: EpisodeLog | None = None
        self.updates: History | None = None
        self.evaluation_log: EvaluationLog | None = None
        self._histories: tuple[History, ...] = ()  # on the first rank
        if tracker is not None:
            source, files = make_source(config.tasks), task_file_digests(config.tasks)
            self.task_sampler = TaskSampler(config, source, state.task_sampler, state.version, files)
            self.task_sampler.tasks |= resume_point.surviving_tickets
            self.episode_log = EpisodeLog(
                config.run_folder, self.accounting.closed_episodes, state.episode_log_bytes, self._check_launch
            )
            self.updates = summary.open_updates(config.run_folder, state.version, self._check_launch)
            self.evaluation_log = EvaluationLog(config.run_folder, state.version, self._check_launch)
            self._histories = (self.episode_log.history, self.updates, self.evaluation_log.history)
            restore_usage(control, config.judge.budget, config.run_folder)
        self.group_source = GroupSource(
            exchange,
            config,
            resume_point,
            self.accounting,
            self.task_sampler.record_group if self.task_sampler else lambda group: None,
            self.episode_log,
            self.task_sampler.block_list.record_group if self.task_sampler else lambda group: None,
            lambda: control.add(DAMAGED_COUNTER, 1),
        )
        self.checkpoints = Checkpointer(
            config.run_folder / "checkpoints",
            Path(config.model.path),
            config.trainer.checkpoint,
            control.report_progress,
            sync_histories=self._sync_histories,
            staging=launch.staging if launch else None,
            timeout_seconds=config.checkpoint_timeout_seconds,
        )
        self.utilization = EngineUtilization(control, config.worker_names)
        self._sequences: dict[int, list[int]] = {}
        self._tickets = chain(resume_point.reissued_tickets, count(resume_point.next_ticket))
        self._issued = 0  # tickets of this restart epoch

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank talks to the control service and writes the logs."""
        return self.tracker is not None

    def open_job(self, version: int) -> None:
        """Let the workers claim tickets."""
        if self.task_sampler is not None:
            self.control.put_json(TASK_FILES, self.task_sampler.files)
            tickets = self._draw_tickets(version, self._updates_ahead)
            self.control.start_ticket_epoch(self.resume_point.restart_epoch, self.resume_point.version, tickets)
            self.utilization.pop_metrics()

    def open_next_batch(self, version: int) -> None:
        """Mode one_step_off: let the workers generate the next batch while this one is trained from `version`."""
        if self.is_first_rank:
            self._issue_tickets(version, 1)

    def collect(
        self,
        version: int,
        has_new_engines: Callable[[], bool],
        has_engines: Callable[[], bool] = lambda: True,
        has_success: Callable[[str, int], bool] = lambda task_id, version: False,
    ) -> list[Group] | CollectInterrupt:
        """Groups of the next update, or the reason of an interrupt, on every rank. Raises TimeoutError or JobFailed.

        `has_success`: of the replay buffer, which completes groups that failed as a whole.
        """
        chosen: SelectedGroups | CollectInterrupt | None = None
        if self.is_first_rank:
            chosen = self.group_source.wait_for_groups(
                version,
                self.config.trainer.groups_per_update,
                self.config.rollout.episode_timeout_seconds,
                lambda ready: self._should_continue(version, ready, has_new_engines),
                has_engines,
                has_success,
            )
            self._sequences = {group.ticket: sequences for group, sequences in chosen or ()}
            if chosen is None:
                chosen = CollectInterrupt.STOP if self.control.stop_requested() else CollectInterrupt.NEW_ENGINES
        groups = self.exchange.broadcast_groups(chosen)
        if isinstance(groups, CollectInterrupt):
            return groups
        self.control.report_status(f"update {version + 1}: training on {len(groups)} groups{self._problems()}")
        return groups

    def log_update(self, result: UpdateResult) -> None:
        """Log an update and, with keep_records, its groups. Collective."""
        version, groups = result.version, result.groups
        if self.config.tracking.keep_records and self.exchange.topology.is_node_leader:
            path = group_file_path(self.config.records_folder, version - 1, self.exchange.topology.node)
            with continue_without(str(path)):
                write_trajectories(path, self.exchange.trajectories_to_store(groups))
        if self.tracker is None:
            return
        update = self._update_metrics(result)
        assert self.updates is not None
        self.updates.append(update.to_json())
        self._save_judge_usage()
        for alarm in (*result.mismatch.alarms(), *self.group_source.pop_alarms()):
            log.warning("update %d: %s", version, alarm)

    def _update_metrics(self, result: UpdateResult) -> UpdateMetrics:
        version, groups, metrics, seconds = result.version, result.groups, result.metrics, result.seconds
        trajectories = [t for group in groups for t in group.trajectories if t.trainable]
        oldest_versions = map(self.group_source.oldest_version, trajectories)
        staleness = [version - 1 - oldest for oldest in oldest_versions if oldest is not None]
        extra = loss_metrics(metrics) | {"staleness_min": float(min(staleness, default=0))}
        if self.config.trainer.loss.oldest_replayed:
            extra["replayed_trajectories"] = metrics["replayed"]
        if (reward := reward_function(self.config)) is not outcome_reward:
            extra["reward_shaped_mean"] = mean([*map(reward, trajectories)])
        for more in (
            result.mismatch.metrics(),
            episode_metrics(groups),
            credit_metrics(groups, self.config.trainer.advantage),
            step_metrics(groups, self.config.rollout.context.response_format.startswith("memory_")),
            self.checkpoints.pop_metrics(),
            result.system_metrics,
            self.exchange.pop_metrics(),
            self.group_source.pop_metrics(),
            self.task_sampler.metrics() if self.task_sampler else {},
            self.utilization.pop_metrics(),
            self.accounting.wasted_token_shares(),
            {f"dropped/{metric_label(reason)}": float(number) for reason, number in self.accounting.dropped.items()},
        ):
            extra |= more
        return UpdateMetrics(
            version=version,
            groups=len(groups),
            reward_mean=mean([t.reward for t in trajectories]),
            steps_mean=mean([len(t.steps) for t in trajectories]),
            response_tokens_mean=mean_response_tokens([step for t in trajectories for step in t.steps]),
            staleness_mean=mean(staleness),
            staleness_max=max(staleness, default=0),
            clip_fraction=metrics.get("clipped", 0.0) / max(1.0, metrics["response_tokens"]),
            logprob_mismatch_max=result.mismatch.largest,
            logprob_mismatch_tokens=result.mismatch.tokens,
            tokens_per_second=metrics["tokens"] / (seconds.wait + seconds.train + seconds.sync),
            seconds=seconds,
            finished_at=steady_time(),
            extra=extra,
        )

    def close_update(self, groups: Sequence[Group], version: int) -> None:
        """Count the trained groups, free their records, and let the workers claim more tickets."""
        if self.is_first_rank:
            for group in groups:
                self.group_source.close_group(group, self._sequences.pop(group.ticket))
            self._issue_tickets(version, self._updates_ahead)

    def checkpoint_if_due(self, learner: Learner, version: int) -> None:
        """Complete the checkpoint in progress if it is written, and start one of `version` if it is due. Collective."""
        every = self.config.trainer.checkpoint.every
        self.checkpoints.poll()
        if every and version % every == 0:
            self.control.report_status(f"starting checkpoint {version}{self._problems()}")
            self.checkpoints.start_save(learner, self.trainer_state(version))

    def final_checkpoint(self, learner: Learner, version: int) -> None:
        """Write a checkpoint of `version` unless there is one. `end_job` raises if the write failed. Collective.

        With trainer.checkpoint.last=false it only completes the checkpoint in progress.
        """
        self.control.report_status(f"writing checkpoint {version}{self._problems()}")
        self.checkpoints.wait_for_save()
        last, completed = self.config.trainer.checkpoint.last, self.checkpoints.last_completed
        saved = completed[0] if completed is not None else self._resumed_version
        if last and saved != version:
            self.checkpoints.start_save(learner, self.trainer_state(version))
        self.checkpoints.close()

    def trainer_state(self, version: int) -> TrainerState:
        """The state that a checkpoint of `version` stores."""
        new_tickets = max(0, self._issued - len(self.resume_point.reissued_tickets))
        closed_tickets, open_tickets = self.resume_point.checkpoint_tickets(
            self.resume_point.next_ticket + new_tickets, self.group_source.closed_tickets
        )
        return TrainerState(
            version=version,
            restart_epoch=self.resume_point.restart_epoch,
            closed_tickets=closed_tickets,
            open_tickets=open_tickets,
            accounting=self.accounting.state_dict(),
            dropped_tickets=self.tickets_dropped_before + self.group_source.dropped_tickets,
            task_sampler=self.task_sampler.state_dict() if self.task_sampler else None,
            episode_log_bytes=self.episode_log.size if self.episode_log else None,
            has_critic=self.config.trainer.critic is not None,
        )

    def end_job(self, version: int, complete: bool) -> None:
        """Stop the workers and write the summary; then raises JobFailed if the final checkpoint failed. Collective.

        `complete`: all updates and evaluations were made; otherwise the outcome is that of the requested end.
        """
        if self.tracker is not None:
            outcome = "finished" if complete else self.control.requested_outcome()
            with self.control.keep_alive():
                self.control.end_job(outcome)
                self._write_summary(outcome, version)
                self._save_judge_usage()
            assert self.task_sampler is not None
            self.task_sampler.close()
            self.tracker.close("FINISHED" if outcome == "finished" else "KILLED")
        else:
            self.exchange.finish_collecting()
        torch.distributed.barrier()
        if self.checkpoints.last_error is not None:
            raise JobFailed(f"the final checkpoint, of version {version}, is missing: {self.checkpoints.last_error}")

    def _write_summary(self, outcome: str, version: int) -> None:
        """Collect the final reports of the stopped workers, count all episodes, and write the summary."""
        deadline = time.monotonic() + FINAL_REPORT_TIMEOUT_SECONDS
        reports = dict(filter(None, (self._final_report(worker, deadline) for worker in self.config.worker_names)))
        self.group_source.poll(version)
        self.exchange.finish_collecting()
        # A worker that died has no final report: its finished episodes are those that arrived through the ring.
        arrived = self.group_source.episodes_by_worker + Counter(self.resume_point.episodes_counted)
        unreported = sum(count for instance_id, count in arrived.items() if instance_id not in reports)
        reported = sum(report["finished"] for report in reports.values())
        finished = self.resume_point.episodes_closed_before + unreported + reported
        waiting = self.group_source.waiting_episodes() + sum(report["unwritten"] for report in reports.values())
        damaged = self.control.add(DAMAGED_COUNTER, 0)
        accounting = self.accounting.summary(finished, waiting, self.resume_point.episodes_rolled_back, damaged)
        if not accounting["matches"]:
            log.error("the accounting does not match: %s", accounting)
        summary.write_summary(self.config.run_folder, outcome, accounting)
        for history in self._histories:
            history.close()

    def _save_judge_usage(self) -> None:
        with continue_without("the use of judge.budget"):
            save_usage(self.control, self.config.judge.budget, self.config.run_folder)

    def _check_launch(self) -> None:
        """Raise JobFailed if another launch has taken over the run's folder; looks once in LAUNCH_CHECK_SECONDS."""
        if self._launch is None or time.monotonic() < self._launch_checked_at + LAUNCH_CHECK_SECONDS:
            return
        try:
            self._launch.check()
        except LaunchLost as error:
            raise JobFailed(str(error)) from None
        self._launch_checked_at = time.monotonic()

    def _sync_histories(self) -> None:
        """Flush to disk the lines before a checkpoint. Raises OSError."""
        for history in self._histories:
            history.sync()

    def _should_continue(self, version: int, ready: int, has_new_engines: Callable[[], bool]) -> bool:
        self.control.check_job()
        self._check_launch()
        self._issue_tickets(version, self._updates_ahead)
        count = self.config.trainer.groups_per_update
        dropped = self.accounting.format_dropped()
        self.control.report_status(
            f"update {version + 1}: waiting for groups, {ready} of {count}; dropped so far: {dropped}{self._problems()}"
        )
        return not self.control.stop_requested() and not has_new_engines()

    def _problems(self) -> str:
        """Suffix of the status line while the last checkpoint failed or a sink does not answer; otherwise empty."""
        failures, error = self.checkpoints.failures, self.checkpoints.last_error
        text = f"; {failures} checkpoints failed, last error: {error}" if error else ""
        if self.tracker is not None and self.tracker.error is not None:
            text += f"; {self.tracker.error}"
        return text

    @property
    def _updates_ahead(self) -> int:
        """Updates beyond the next one whose groups workers may start while the trainer collects groups."""
        return self.config.rollout.max_staleness if self.config.rollout.mode == "async" else 0

    def _issue_tickets(self, version: int, updates_ahead: int) -> None:
        if tickets := self._draw_tickets(version, updates_ahead):
            self.control.issue_tickets(tickets)

    def _draw_tickets(self, version: int, updates_ahead: int) -> dict[int, TaskReference]:
        """The tickets up to the limit, with their tasks: those that are issued again come first."""
        if self.task_sampler is None or version >= self.config.trainer.updates:
            return {}  # no more groups are needed
        groups = self.config.trainer.groups_per_update
        lost = self.group_source.dropped_tickets + self.group_source.lost_tickets
        closed = (version - self.resume_point.version) * groups + lost
        limit = ticket_limit(len(self.resume_point.surviving_tickets), closed, updates_ahead, groups)
        tickets = list(islice(self._tickets, max(0, limit - self._issued)))
        self._issued += len(tickets)
        self.group_source.issued |= dict.fromkeys(tickets, version)
        return self.task_sampler.draw(tickets, version)

    def _final_report(self, worker: str, deadline: float) -> tuple[str, dict[str, Any]] | None:
        """A worker's instance id and final counts; None if it sends no report before the deadline."""
        while (report := self.control.get_json(f"final_counts/{worker}")) is None:
            if worker in self.control.given_up_workers() or self.control.is_lost(worker) or time.monotonic() > deadline:
                log.warning("%s sent no final report; counting the episodes that arrived from it", worker)
                return None
            time.sleep(0.05)
        return report["instance_id"], report
