"""The trainer's part in evaluations: when one is due, asking the workers for it, and writing down what came.

An evaluation beside the training (`beside`) is never waited for before the last update. One that runs alone (`before`,
`after`) has the version that it was asked for, exactly. An evaluation that fails costs its figures, never the run.
"""

from __future__ import annotations

import logging
import time
from enum import Enum

from megatron_webrl import evaluations
from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.evaluations import Collector, Request
from megatron_webrl.tracking import evaluation_files as files
from megatron_webrl.tracking.evaluation import figures, scalars
from megatron_webrl.tracking.mlflow_run import Tracker
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.trainer.publish import Publisher

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
TURN_SECONDS = 30.0  # the other ranks wait in a collective, which has a limit: they hear of the first one so often


class _State(Enum):
    OVER = "there is nothing to wait for"
    RUNNING = "results are missing"
    NEWCOMERS = "an engine waits for weights"


class Evaluation:
    """Life: before, then beside after each update, after at the end. The first rank works, the others follow."""

    def __init__(
        self, config: Config, control: Control, tracker: Tracker | None, incarnation: int, version: int
    ) -> None:
        """`tracker` is the first rank's; `version` is the one that this incarnation begins with."""
        self.config, self.control, self.tracker = config, control, tracker
        self.incarnation = incarnation
        self._collector: Collector | None = None
        self._started = 0.0
        if tracker is not None:
            files.forget_after(config.run_folder, version)
            evaluations.withdraw(control)  # what a trainer that died had asked for

    def before(self, version: int, publisher: Publisher) -> None:
        """Evaluate what the run starts from, unless an earlier incarnation has done so. Collective."""
        if self.config.evaluation.before:
            if self.tracker is not None and not self._measured_before():
                self._ask("before", version, alone=True)
            self._wait(version, publisher)

    def beside(self, version: int) -> None:
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

    def after(self, version: int, publisher: Publisher) -> None:
        """Let the last evaluation end, and evaluate what the last update made, if all are made. Collective."""
        if version < self.config.trainer.updates:
            if self._collector is not None:
                self._leave("the run was stopped")
            return
        self._wait(version, publisher)
        for kind, wanted in (
            ("after", self.config.evaluation.after),
            ("blank_images", self.config.evaluation.blank_images),
        ):
            if wanted:
                if publisher.version != version:  # engines with fixed weights lag behind
                    publisher.publish(version)
                if self.tracker is not None and not self.control.stop_requested():
                    self._ask(kind, version, alone=True)
                self._wait(version, publisher)

    def _measured_before(self) -> bool:
        settings = self.config.evaluation
        wanted = (settings.temperature, settings.samples, self._tasks)
        lines = [line for line in files.read(self.config.run_folder) if line["kind"] == "before"]
        return bool(lines) and wanted == (lines[0]["temperature"], lines[0]["samples"], lines[0]["tasks_asked"])

    @property
    def _tasks(self) -> int:
        return self.config.evaluation.episodes * len(self.config.tasks.environments)

    def _ask(self, kind: str, version: int, alone: bool = False) -> None:
        settings = self.config.evaluation
        number = evaluations.next_number(self.control)
        request = Request(number, kind, self._tasks, settings.samples, settings.temperature, version, alone)
        evaluations.ask(self.control, request)
        self._collector, self._started = Collector(self.control, request), time.monotonic()

    def _wait(self, version: int, publisher: Publisher) -> None:
        """Until the evaluation under way is over; engines that come meanwhile get their weights. Collective."""
        state = _State.RUNNING
        while (state := broadcast_object(self._turn(publisher) if self.tracker is not None else state)) != _State.OVER:
            if state == _State.NEWCOMERS:
                publisher.publish(version, newcomers_only=True)

    def _turn(self, publisher: Publisher) -> _State:
        deadline = time.monotonic() + TURN_SECONDS
        while time.monotonic() < deadline:
            self.control.check()
            self._poll()
            if self._collector is None:
                return _State.OVER
            if self.control.stop_requested():
                self._leave("an early end was asked for")
                return _State.OVER
            if publisher.newcomers():
                return _State.NEWCOMERS
            request, done = self._collector.request, len(self._collector.results)
            self.control.report(f"evaluation {request.kind}: {done} of {request.episodes} episodes")
            time.sleep(POLL_SECONDS)
        return _State.RUNNING

    def _poll(self) -> None:
        """Write the evaluation down if it is complete, or at its limit."""
        if self._collector is None:
            return
        seconds, limit = time.monotonic() - self._started, self.config.evaluation.seconds
        complete = self._collector.poll()
        if not complete and seconds < limit:
            return
        collector, self._collector = self._collector, None
        evaluations.withdraw(self.control)
        if not complete:
            log.warning(
                "evaluation %s: %d of %d episodes are missing after %.0f s (evaluation.seconds)",
                collector.request.kind,
                collector.missing,
                collector.request.episodes,
                limit,
            )
        self._record(collector, seconds)

    def _record(self, collector: Collector, seconds: float) -> None:
        results = [collector.results[episode] for episode in sorted(collector.results)]
        line = figures(collector.request, results, seconds, self.incarnation)
        files.append(self.config.run_folder, line, results)
        log.info(
            "evaluation %s of version %s: success %s of %d episodes in %.1f s",
            line["kind"],
            line["version"],
            line["success"],
            line["episodes"],
            seconds,
        )
        if self.tracker is not None:
            self.tracker.log_metrics(scalars(line), line["version"])

    def _leave(self, reason: str) -> None:
        assert self._collector is not None
        log.info("evaluation %s is left unfinished: %s", self._collector.request.kind, reason)
        self._collector = None
        evaluations.withdraw(self.control)
