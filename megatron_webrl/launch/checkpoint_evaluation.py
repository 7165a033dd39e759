"""Evaluate a checkpoint with the workers of a job: request its evaluations, collect, store and print the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.evaluated_checkpoint import EvaluatedCheckpoint
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.track import evaluations, tables
from megatron_webrl.track.evaluations import (
    BLANK_IMAGES,
    EvaluationLog,
    EvaluationResult,
    ResultCollector,
    aggregate_results,
    contrast,
    make_request,
    requested_variants,
)
from megatron_webrl.track.mlflow_upload import MLflowTracker
from megatron_webrl.types import BUDGET_SPENT

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class EvaluationProgress:
    """What a running evaluation has so far."""

    kind: str  # "checkpoint", or the variant: "blank images" or "greedy"
    status: str  # of the first worker, until the first episode of the job has started; then empty
    results: Mapping[int, EvaluationResult]  # by episode
    episodes: int  # requested


@dataclass
class CheckpointEvaluation:
    """The evaluations of a checkpoint, one after the other. Call `run` once, then `print_end`."""

    config: Config
    checkpoint: EvaluatedCheckpoint
    output_file: Path | None = None
    summaries: list[dict[str, Any]] = field(default_factory=list)
    results: list[list[EvaluationResult]] = field(default_factory=list)  # by summary
    complete: bool = False  # whether all evaluations have ended
    unwritten: dict[Path, str] = field(default_factory=dict)  # files that lack results, and why
    not_sent: str | None = None  # what MLflow has not received

    def run(
        self, control: ControlClient, poll: Callable[[], str | None], show: Callable[[EvaluationProgress], None]
    ) -> str:
        """Run all evaluations and store their results; returns the outcome of the job.

        `poll` watches the job and returns its outcome if it has ended early; a requested stop ends it, too: a part of
        an evaluation is no result. `show` receives every POLL_SECONDS what the current evaluation has. Raises JobFailed
        without a control service.
        """
        for number, variant in enumerate(requested_variants(self.config.evaluation), 1):
            if (outcome := self._evaluate(control, number, variant, poll, show)) is not None:
                return outcome
        return self._store_results()

    def print_end(self, outcome: str, console: Console) -> None:
        """Print the results, if all evaluations have ended, and why the job has none or failed."""
        if self.complete:
            self._print_results(console)
        if outcome != "finished":
            console.print(self.describe_outcome(outcome), style="bold red", markup=False, soft_wrap=True)

    def _print_results(self, console: Console) -> None:
        """Print the table of all evaluations, what they measure of the checkpoint, and where the results are."""
        console.print(tables.evaluation_table(self.summaries))
        console.print(tables.EVALUATION_LEGEND, style="dim")
        for summary in self.summaries:
            console.print(tables.format_rates(summary), markup=False, highlight=False, soft_wrap=True)
        if count := self.summaries[0]["not_recorded_requests"]:
            console.print(f"requests that no recording answered (browser.replay): {count}", highlight=False)
        for entry in self.summaries[0]["pass_at"].items() if self.config.evaluation.samples > 1 else ():
            console.print("pass@{}: {:.1%}".format(*entry), highlight=False)
        if gain := self._image_gain():
            line = tables.format_difference(tables.IMAGE_GAIN_NAME, gain)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        written = [path for path in (self.output_file, self._stored_file) if path and path not in self.unwritten]
        if written:
            console.print(f"results: {written[0]}", markup=False, soft_wrap=True)
        if self.not_sent is not None:
            console.print(self.not_sent, style="yellow", markup=False, soft_wrap=True)

    def describe_outcome(self, outcome: str) -> str:
        """The outcome of a job without a result, in one line."""
        if outcome != BUDGET_SPENT:
            return outcome
        limits = ", ".join(f"{name}={limit:g}" for name, limit in asdict(self.config.judge.budget).items() if limit)
        return (
            f"{outcome}: the evaluation has no result, because its verdicts need more than judge.budget ({limits}); "
            "raise it, or evaluate fewer episodes (evaluation.episodes)"
        )

    def _evaluate(
        self,
        control: ControlClient,
        number: int,
        variant: str,
        poll: Callable[[], str | None],
        show: Callable[[EvaluationProgress], None],
    ) -> str | None:
        """Run one evaluation; returns the outcome of the job if it ended early."""
        settings = self.config.evaluation
        indices, version = evaluation_task_indices(self.config), self.checkpoint.version
        request = make_request(number, "checkpoint", variant, indices, settings, version, exclusive=True)
        evaluations.submit_request(control, request)
        collector, started_at = ResultCollector(control, request), None
        name = variant.replace("_", " ") or request.kind
        while not collector.poll():
            if (outcome := poll()) is not None:
                return outcome
            if control.stop_requested():
                return control.requested_outcome()
            started_at = started_at or (time.monotonic() if collector.has_started else None)
            if started_at is not None and time.monotonic() > started_at + settings.timeout_seconds:
                break
            status = "" if started_at or number > 1 else control.status_of(self.config.worker_names[0]) or "starting"
            show(EvaluationProgress(name, status, collector.results, request.episodes))
            time.sleep(POLL_SECONDS)
        show(EvaluationProgress(name, "", collector.results, request.episodes))
        evaluations.withdraw_request(control)
        results = [collector.results[episode] for episode in sorted(collector.results)]
        now = time.monotonic()
        summary = aggregate_results(request, results, now - (started_at or now))
        summary["checkpoint"] = str(self.checkpoint.path)
        try:
            stored = EvaluationLog(self.config.run_folder)
            stored.append(summary, results)
            stored.history.sync()
        except OSError as error:
            self.unwritten[self._stored_file] = str(error.strerror)
        self.summaries.append(summary)
        self.results.append(results)
        return None

    def _store_results(self) -> str:
        """Write the results to the output file, and log them to MLflow; returns the outcome of the job."""
        settings, missing = self.config.evaluation, sum(summary["missing"] for summary in self.summaries)
        outcome = "finished"
        if missing:
            requested = sum(summary["tasks_requested"] * summary["samples"] for summary in self.summaries)
            outcome = (
                f"failed: {missing} of {requested} episodes are missing after {settings.timeout_seconds:g} s "
                "(evaluation.timeout_seconds); raise it, or lower evaluation.episodes"
            )
        if self.output_file is not None:
            try:
                self.output_file.write_text(json.dumps(self._report(), indent=1) + "\n")
            except OSError as error:
                self.unwritten[self.output_file] = str(error.strerror)
        tracker = MLflowTracker(self.config)
        tracker.close("FAILED" if missing else "FINISHED")
        self.not_sent = tracker.pending_message()
        self.complete = True
        if self.unwritten:
            return f"failed: {'; '.join(f'{path} cannot be written: {why}' for path, why in self.unwritten.items())}"
        return outcome

    @property
    def _stored_file(self) -> Path:
        return self.config.run_folder / evaluations.FILE

    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {"checkpoint": str(self.checkpoint.path)}
        for summary, results in zip(self.summaries, self.results, strict=True):
            variant = summary["variant"]
            report[variant or "evaluation"] = summary
            report[f"{variant}_episodes" if variant else "episodes"] = [asdict(result) for result in results]
            if variant == BLANK_IMAGES:
                report["image_gain"] = self._image_gain()
        return report

    def _image_gain(self) -> dict[str, Any] | None:
        variants = [summary["variant"] for summary in self.summaries]
        if BLANK_IMAGES not in variants:
            return None
        return contrast([(1, self.results[0]), (-1, self.results[variants.index(BLANK_IMAGES)])])
