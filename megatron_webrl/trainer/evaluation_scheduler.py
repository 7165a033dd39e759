"""The trainer's side of evaluations: request one when it is due, and record its results.

An evaluation during training is not waited for before the last update. One before or after training runs exclusively:
all of its tokens come from the requested version. An evaluation that fails costs its metrics, never the run.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from typing import Literal

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.track import evaluations, tables
from megatron_webrl.track.evaluations import (
    EvaluationLog,
    ResultCollector,
    aggregate_results,
    make_request,
    requested_variants,
)
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
BROADCAST_SECONDS = 30.0  # the other ranks wait in a collective with a timeout: the first rank answers this often
_WaitState = Literal["running", "new engines", "done"]  # of an evaluation; new engines wait for weights


class EvaluationScheduler:
    """Calls: run_before_training; poll_during_training after each update; run_after_training. The first rank acts."""

    def __init__(
        self, config: Config, control: ControlClient, evaluation_log: EvaluationLog | None, restart_epoch: int
    ) -> None:
        """`evaluation_log` is None except on the first rank."""
        self.config, self.control, self.evaluation_log = config, control, evaluation_log
        self.restart_epoch = restart_epoch
        self._collector: ResultCollector | None = None
        self._started = 0.0
        self._made: set[tuple[str, str, int]] = set()  # kind, variant and version of those made since the start
        self.cut_short = False  # whether an early end has cost an evaluation; first rank
        if evaluation_log is not None:
            evaluations.withdraw_request(control)  # a request that an earlier trainer left

    def run_before_training(self, version: int, weight_syncer: WeightSyncer) -> None:
        """Evaluate the initial policy, in the variants of which the run has no result. Collective."""
        if self.config.evaluation.before:
            self._run_variants("before", version, weight_syncer)

    def poll_during_training(self, version: int) -> None:
        """Record a completed evaluation, and request one if it is due. Does not wait."""
        if self.evaluation_log is None:
            return
        self._poll()
        settings = self.config.evaluation
        last = version >= self.config.trainer.updates
        if not settings.every or version % settings.every or (last and settings.after):
            return
        if self._collector is not None:
            log.warning(
                "skipping the evaluation of version %d: an earlier one has %d of %d episodes (evaluation.every=%d)",
                version, len(self._collector.results), self._collector.request.episodes, settings.every,
            )  # fmt: skip
            return
        self._submit("during", version)

    def run_after_training(self, version: int, weight_syncer: WeightSyncer) -> None:
        """Wait for the running evaluation; evaluate the final policy if all updates were made. Collective."""
        if version < self.config.trainer.updates:
            if self._collector is not None:
                self._cancel("the run was stopped")
            return
        self._wait(version, weight_syncer)
        settings = self.config.evaluation
        ends_interval = bool(version and settings.every and version % settings.every == 0)
        if (settings.after or ends_interval) and weight_syncer.version != version:  # mode one_step_off
            weight_syncer.sync(version)
        if settings.after:
            self._run_variants("after", version, weight_syncer)
        elif ends_interval:  # unless it has been made
            self._run_if_due("during", "", version, weight_syncer, exclusive=False)

    def _run_variants(self, kind: str, version: int, weight_syncer: WeightSyncer) -> None:
        """Run the evaluations before or after training that the run has no result of, one by one. Collective."""
        for variant in requested_variants(self.config.evaluation):
            self._run_if_due(kind, variant, version, weight_syncer, exclusive=True)

    def _run_if_due(self, kind: str, variant: str, version: int, weight_syncer: WeightSyncer, exclusive: bool) -> None:
        """Run an evaluation and wait for it, unless the run has its result. Collective."""
        if self.evaluation_log is not None and self._is_due(kind, variant, version):
            if self.control.stop_requested():
                self.cut_short = True
            else:
                self._submit(kind, version, variant, exclusive)
        self._wait(version, weight_syncer)

    def _is_due(self, kind: str, variant: str, version: int) -> bool:
        """Whether the run has no result of this policy, tasks and sampling. None from before training is added once
        training has changed the policy.
        """
        if (kind == "before" and version) or (kind, variant, version) in self._made:
            return False
        request = make_request(0, kind, variant, self._task_indices, self.config.evaluation, version, True)
        fields = ("kind", "version", "variant", "temperature", "top_p", "top_k", "samples", "first_task")
        wanted = {"tasks_requested": request.tasks} | {name: getattr(request, name) for name in fields}
        try:
            lines = evaluations.read_evaluations(self.config.run_folder)
        except OSError as error:
            log.error("earlier evaluations cannot be read: %s; the job continues without them", first_line(error))
            return True
        return not any(wanted.items() <= line.items() for line in lines)

    @cached_property
    def _task_indices(self) -> range:
        return evaluation_task_indices(self.config)

    def _submit(self, kind: str, version: int, variant: str = "", exclusive: bool = False) -> None:
        number = self.control.add("evaluation/request_count", 1)  # that no other request of the job has
        request = make_request(number, kind, variant, self._task_indices, self.config.evaluation, version, exclusive)
        evaluations.submit_request(self.control, request)
        self._collector, self._started = ResultCollector(self.control, request), time.monotonic()

    def _wait(self, version: int, weight_syncer: WeightSyncer) -> None:
        """Wait for the running evaluation; new engines get their weights meanwhile. Collective."""
        state: _WaitState = "running"
        while state != "done":
            state = broadcast_object(self._poll_for_a_while(weight_syncer) if self.evaluation_log else state)
            if state == "new engines":
                weight_syncer.sync(version, new_engines_only=True)

    def _poll_for_a_while(self, weight_syncer: WeightSyncer) -> _WaitState:
        """First rank: poll until the state changes, for at most BROADCAST_SECONDS."""
        deadline = time.monotonic() + BROADCAST_SECONDS
        while time.monotonic() < deadline:
            self.control.check_job()
            self._poll()
            if self._collector is None:
                return "done"
            if self.control.stop_requested():
                self._cancel(f"an early end was requested ({self.control.requested_outcome()})")
                return "done"
            if weight_syncer.has_new_engines():
                return "new engines"
            request, done = self._collector.request, len(self._collector.results)
            self.control.report_status(f"evaluation {request.name}: {done} of {request.episodes} episodes")
            time.sleep(POLL_SECONDS)
        return "running"

    def _poll(self) -> None:
        """Record the running evaluation if it is complete or has reached its time limit."""
        if self._collector is None:
            return
        seconds, complete = time.monotonic() - self._started, self._collector.poll()
        if not complete and seconds < self.config.evaluation.timeout_seconds:
            return
        collector, self._collector = self._collector, None
        evaluations.withdraw_request(self.control)
        if not complete:
            log.warning(
                "evaluation %s: %d of %d episodes are missing after %g s (evaluation.timeout_seconds)",
                collector.request.name, collector.missing_count, collector.request.episodes, seconds,
            )  # fmt: skip
        self._record(collector, seconds)

    def _record(self, collector: ResultCollector, seconds: float) -> None:
        request = collector.request
        self._made.add((request.kind, request.variant, request.version))  # its line may be lost on a full disk
        results = [collector.results[episode] for episode in sorted(collector.results)]
        line = aggregate_results(request, results, seconds, self.restart_epoch)
        assert self.evaluation_log is not None
        self.evaluation_log.append(line, results)
        log.info("evaluation of version %d in %.1f s: %s", line["version"], seconds, tables.format_rates(line))

    def _cancel(self, reason: str) -> None:
        assert self._collector is not None
        self.cut_short = True
        log.info("evaluation %s cancelled: %s", self._collector.request.name, reason)
        self._collector = None
        evaluations.withdraw_request(self.control)
