"""The trainer's part in evaluations: when one is due, asking the workers for it, and writing down what came.

An evaluation beside the training (`beside`) is never waited for before the last update. One that runs alone (`before`,
`after`) has the version that it was asked for, exactly. An evaluation that fails costs its figures, never the run.
"""

from __future__ import annotations

import logging
import time
from enum import Enum

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.evaluation import evaluation_queue
from megatron_webrl.evaluation import result_files as files
from megatron_webrl.evaluation.evaluation_queue import EvaluationRequest, ResultCollector
from megatron_webrl.evaluation.results import aggregate_results, mlflow_metrics
from megatron_webrl.tracking.mlflow_run import MLflowTracker
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.trainer.weight_sync import WeightSyncer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
BROADCAST_SECONDS = 30.0  # the other ranks wait in a collective, which has a limit: they hear of the first one so often


class _WaitState(Enum):
    DONE = "there is nothing to wait for"
    RUNNING = "results are missing"
    NEW_ENGINES = "an engine waits for weights"


class EvaluationScheduler:
    """Life: before, then beside after each update, after at the end. The first rank works, the others follow."""

    def __init__(
        self, config: Config, control: ControlClient, tracker: MLflowTracker | None, restart_epoch: int, version: int
    ) -> None:
        """`tracker` is the first rank's; `version` is the one that this incarnation begins with."""
        self.config, self.control, self.tracker = config, control, tracker
        self.restart_epoch = restart_epoch
        self._collector: ResultCollector | None = None
        self._started = 0.0
        if tracker is not None:
            files.truncate_after(config.run_folder, version)
            evaluation_queue.withdraw_request(control)  # what a trainer that died had asked for

    def run_before_training(self, version: int, weight_syncer: WeightSyncer) -> None:
        """Evaluate what the run starts from, unless an earlier incarnation has done so. Collective."""
        if self.config.evaluation.before:
            if self.tracker is not None and not self._measured_before():
                self._ask("before", version, alone=True)
            self._wait(version, weight_syncer)

    def poll_during_training(self, version: int) -> None:
        """Write down what has come, and ask for an evaluation if one is due. Never waits."""
        if self.tracker is None:
            return
        self._poll()
        settings = self.config.evaluation
        last = version >= self.config.trainer.updates
        if not settings.every or version % settings.every or (last and settings.after):
            return
        if self._collector is not None:
            log.warning(
                "no evaluation of version %d: an earlier one is at %d of %d episodes (evaluation.every=%d)",
                version,
                len(self._collector.results),
                self._collector.request.episodes,
                settings.every,
            )
            return
        self._ask("during", version)

    def run_after_training(self, version: int, weight_syncer: WeightSyncer) -> None:
        """Let the last evaluation end, and evaluate what the last update made, if all are made. Collective."""
        if version < self.config.trainer.updates:
            if self._collector is not None:
                self._leave("the run was stopped")
            return
        self._wait(version, weight_syncer)
        for kind, wanted in (
            ("after", self.config.evaluation.after),
            ("blank_images", self.config.evaluation.blank_images),
        ):
            if wanted:
                if weight_syncer.version != version:  # engines with fixed weights lag behind
                    weight_syncer.sync(version)
                if self.tracker is not None and not self.control.stop_requested():
                    self._ask(kind, version, alone=True)
                self._wait(version, weight_syncer)

    def _measured_before(self) -> bool:
        settings = self.config.evaluation
        wanted = (settings.temperature, settings.samples, self._tasks)
        lines = [line for line in files.read_evaluations(self.config.run_folder) if line["kind"] == "before"]
        return bool(lines) and wanted == (lines[0]["temperature"], lines[0]["samples"], lines[0]["tasks_requested"])

    @property
    def _tasks(self) -> int:
        return self.config.evaluation.episodes * len(self.config.tasks.environments)

    def _ask(self, kind: str, version: int, alone: bool = False) -> None:
        settings = self.config.evaluation
        number = evaluation_queue.next_request_number(self.control)
        request = EvaluationRequest(number, kind, self._tasks, settings.samples, settings.temperature, version, alone)
        evaluation_queue.submit_request(self.control, request)
        self._collector, self._started = ResultCollector(self.control, request), time.monotonic()

    def _wait(self, version: int, publisher: WeightSyncer) -> None:
        """Until the evaluation under way is over; engines that come meanwhile get their weights. Collective."""
        state = _WaitState.RUNNING
        while (
            state := broadcast_object(self._turn(publisher) if self.tracker is not None else state)
        ) != _WaitState.DONE:
            if state == _WaitState.NEW_ENGINES:
                publisher.sync(version, new_engines_only=True)

    def _turn(self, publisher: WeightSyncer) -> _WaitState:
        deadline = time.monotonic() + BROADCAST_SECONDS
        while time.monotonic() < deadline:
            self.control.check_job()
            self._poll()
            if self._collector is None:
                return _WaitState.DONE
            if self.control.stop_requested():
                self._leave("an early end was asked for")
                return _WaitState.DONE
            if publisher.has_new_engines():
                return _WaitState.NEW_ENGINES
            request, done = self._collector.request, len(self._collector.results)
            self.control.report_status(f"evaluation {request.kind}: {done} of {request.episodes} episodes")
            time.sleep(POLL_SECONDS)
        return _WaitState.RUNNING

    def _poll(self) -> None:
        """Write the evaluation down if it is complete, or at its limit."""
        if self._collector is None:
            return
        seconds, limit = time.monotonic() - self._started, self.config.evaluation.timeout_seconds
        complete = self._collector.poll()
        if not complete and seconds < limit:
            return
        collector, self._collector = self._collector, None
        evaluation_queue.withdraw_request(self.control)
        if not complete:
            log.warning(
                "evaluation %s: %d of %d episodes are missing after %.0f s (evaluation.timeout_seconds)",
                collector.request.kind,
                collector.missing_count,
                collector.request.episodes,
                limit,
            )
        self._record(collector, seconds)

    def _record(self, collector: ResultCollector, seconds: float) -> None:
        results = [collector.results[episode] for episode in sorted(collector.results)]
        line = aggregate_results(collector.request, results, seconds, self.restart_epoch)
        files.append_evaluation(self.config.run_folder, line, results)
        log.info(
            "evaluation %s of version %s: success %s of %d episodes in %.1f s",
            line["kind"],
            line["version"],
            line["success"],
            line["episodes"],
            seconds,
        )
        if self.tracker is not None:
            self.tracker.log_metrics(mlflow_metrics(line), line["version"])

    def _leave(self, reason: str) -> None:
        assert self._collector is not None
        log.info("evaluation %s is left unfinished: %s", self._collector.request.kind, reason)
        self._collector = None
        evaluation_queue.withdraw_request(self.control)
