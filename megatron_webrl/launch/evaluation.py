"""`webrl eval` and evaluations as Slurm jobs: the checkpoint, its configuration, its preparation, and the results.

The engines use every GPU of the job's nodes. The first node of a Slurm job prepares the run's folder, converts a
Megatron checkpoint into it, which all nodes read, and collects the results.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_webrl.config.load import parse_config, resolve_cluster_sizes, save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FILE_SOURCES, FileTasksConfig, MixTasksConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.roles import webrl_command
from megatron_webrl.launch.run_folder import check_ended, config_path
from megatron_webrl.launch.signals import exit_by_signal
from megatron_webrl.launch.slurm.prepare import describe_processes, prepare_job
from megatron_webrl.model.convert.checkpoint_folder import HF_FOLDER, find_checkpoint
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
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch
from megatron_webrl.track.summary import write_summary
from megatron_webrl.track.upload import Tracker
from megatron_webrl.types import BUDGET_SPENT
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import metric_label

SHARD_BYTES = 5 * 10**9
POLL_SECONDS = 0.25
JOB_FILE = "evaluation_job.json"
MODEL_PREFIX = "converted_model-"  # of a folder in the run's folder, until the end of the job


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A Hugging Face folder, or a Megatron checkpoint that is converted to one for the engines."""

    path: Path
    is_megatron: bool
    version: int  # policy version of a run's checkpoint; 0 otherwise

    @classmethod
    def resolve(cls, path: Path) -> EvaluatedCheckpoint:
        """Resolve a path: a Hugging Face folder, a checkpoint, or a run's newest checkpoint. Raises ConfigError."""
        if (path / "config.json").is_file():
            return cls(path, is_megatron=False, version=0)
        try:
            checkpoint = find_checkpoint(newest_in_run(path) or path)
        except ValueError as error:
            raise ConfigError(
                f"{path} is neither a Hugging Face folder (no config.json) nor a checkpoint: {error}"
            ) from None
        state = checkpoint / "state.json"
        return cls(checkpoint, True, json.loads(state.read_text())["version"] if state.is_file() else 0)

    @property
    def run_config_path(self) -> Path:
        """Configuration of the run that owns the checkpoint. Raises ConfigError without one."""
        path = self.path.resolve().parent.parent / "config.yaml"
        if not self.is_megatron or not path.is_file():
            raise ConfigError(f"{self.path} is not in a run's checkpoints folder; name a configuration after it")
        return path

    def convert(self, folder: Path) -> None:
        """Convert a Megatron checkpoint to a Hugging Face folder. Raises ConfigError for incomplete weights.

        SIGINT and SIGTERM raise SystemExit meanwhile, which leaves no incomplete folder.
        """
        with exit_by_signal(signal.SIGINT, signal.SIGTERM):
            from megatron_webrl.model.convert.conversion import ConversionOptions, megatron_to_hf  # torch

            try:
                megatron_to_hf(self.path, folder, SHARD_BYTES, ConversionOptions())
            except ValueError as error:
                raise ConfigError(str(error)) from error


def newest_in_run(folder: Path) -> Path | None:
    """The newest checkpoint in a run's folder, or in its `checkpoints`; None without one."""
    return find_latest_checkpoint(folder.parent if folder.name == "checkpoints" else folder)


def parse_evaluation_config(checkpoint: EvaluatedCheckpoint, arguments: Sequence[str], nodes: int = 1) -> Config:
    """Parse `arguments`: a file (default: the run's own), then overrides; it has its own folder. Raises ConfigError.

    A configuration of a training job is changed to one without a trainer, whose engines fill `nodes` nodes.
    """
    file = Path(arguments[0]) if arguments and "=" not in arguments[0] else None
    overrides = list(arguments if file is None else arguments[1:])
    config = parse_config(
        file or checkpoint.run_config_path, ["evaluation.only=true", f"cluster.nodes={nodes}", *overrides]
    )
    chosen = any(override.startswith("rollout.engines=") for override in overrides)
    if not chosen and (config.cluster.gpus_per_node or config.cluster.nodes > 1):
        config.rollout.engines = 0  # the file may hold the number of a training job
        resolve_cluster_sizes(config)
    # A name that evaluations of other checkpoints and other Slurm jobs do not have; a requeued job has its own.
    label = metric_label(checkpoint.path.absolute().name)
    parts = [config.run.name, "evaluation", label, os.environ.get("SLURM_JOB_ID", "")]
    config.run = replace(config.run, name="-".join(filter(None, parts)), resume=False)
    folder = checkpoint.path / HF_FOLDER if checkpoint.is_megatron else checkpoint.path
    config.model = replace(config.model, path=str(folder), checkpoint="")
    warm_start = config.trainer.warm_start
    config.trainer.warm_start = replace(warm_start, demonstrations=0, demonstrations_file="")
    if isinstance(config.tasks, FileTasksConfig) and config.tasks.from_files:
        config.tasks.train_file = ""  # not read; its machine may not have it
    elif isinstance(config.tasks, MixTasksConfig):
        config.tasks.mix = [
            entry | ({"train_file": ""} if entry["source"] in FILE_SOURCES else {}) for entry in config.tasks.mix
        ]
    config.evaluation = replace(config.evaluation, before=False, after=True, every=0)
    return config


def check_output_file(file: Path | None) -> None:
    """Raise ConfigError if the folder of the output file does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--json={file}: {file.absolute().parent} is not a folder")


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
    not_sent: str | None = None  # what the sinks of metrics have not received

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
            published = [tables.format_published(summary)] if self.config.judge.uses_models else []
            for line in (tables.format_rates(summary), *published):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        if count := self.summaries[0]["not_recorded_requests"]:
            console.print(f"requests that no recording answered (browser.replay): {count}", highlight=False)
        for entry in self.summaries[0]["pass_at"].items() if self.config.evaluation.samples > 1 else ():
            console.print("pass@{}: {:.1%}".format(*entry), highlight=False)
        if gain := self._image_gain():
            for line in tables.difference_lines(tables.IMAGE_GAIN_NAME, gain):
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
        """Write the results to the output file, and log them; returns the outcome of the job."""
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
        tracker = Tracker(self.config)
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
        blank = variants.index(BLANK_IMAGES)
        return contrast((weight, self.summaries[at], self.results[at]) for weight, at in ((1, 0), (-1, blank)))


@dataclass(frozen=True)
class EvaluationJob:
    """What the preparation decided, for the later commands of the job."""

    checkpoint: EvaluatedCheckpoint
    output_file: Path | None
    model_folder: str = field(default_factory=lambda: f"{MODEL_PREFIX}{secrets.token_hex(4)}")
    """Name of this launch's folder for the converted checkpoint; a launch that requeues the job has another."""

    def save(self, folder: Path) -> None:
        """Write it to the run's folder."""
        atomic_file.write_text(folder / JOB_FILE, json.dumps(asdict(self), indent=1, default=str) + "\n")

    @classmethod
    def load(cls, folder: Path) -> EvaluationJob:
        """Read it from the run's folder. Raises ConfigError for the folder of another job."""
        path = folder / JOB_FILE
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist; prepare the evaluation first: webrl node prepare-eval CHECKPOINT"
            )
        fields = json.loads(path.read_text())
        checkpoint = EvaluatedCheckpoint(**{**fields["checkpoint"], "path": Path(fields["checkpoint"]["path"])})
        return cls(checkpoint, fields["output_file"] and Path(fields["output_file"]), fields["model_folder"])


def prepare_evaluation(
    config: Config, job: EvaluationJob, stubbed: bool, report: Callable[[str], None], environment: Mapping[str, str]
) -> Path:
    """Make the run's folder of an evaluation as `prepare_job`; returns the path of its config.yaml."""
    check_ended(config)
    for left in config.run_folder.glob(f"{MODEL_PREFIX}*"):  # by a job that was killed
        shutil.rmtree(left, ignore_errors=True)
    path = prepare_job(config, stubbed, report, environment)
    job.save(config.run_folder)
    return path


def describe_evaluation(config: Config, job: EvaluationJob, stub_command: str) -> list[str]:
    """Every process of an evaluation: node, devices, cores, and the full command. Raises ConfigError."""
    lines = describe_processes(config, stub_command)
    settings, node = str(config_path(config)), " ".join(webrl_command(["node"]))
    if job.checkpoint.is_megatron:
        lines.append(f"node 0 conversion: {node} convert {settings}")
    return [*lines, f"node 0 evaluation: {node} control {settings} --host FIRST_NODE"]


def convert_checkpoint(config: Config, launch: Launch | None) -> None:
    """Convert the job's Megatron checkpoint, if it is one, and let config.yaml name the result as the model.

    Raises ConfigError for incomplete weights, and writes it to summary.json. SIGTERM ends it and leaves no weights.
    Raises LaunchLost if another launch has taken over meanwhile, whose config.yaml stays as it is.
    """
    job = EvaluationJob.load(config.run_folder)
    if not job.checkpoint.is_megatron:
        return
    folder = config.run_folder / job.model_folder
    try:
        job.checkpoint.convert(folder)
    except ConfigError as error:
        write_summary(config.run_folder, f"failed: {error}", None)
        raise
    if launch is not None:
        launch.check()
    config.model = replace(config.model, path=str(folder))
    save_config(config, config_path(config))


@contextmanager
def hosted_evaluation(config: Config) -> Iterator[CheckpointEvaluation]:
    """The job's evaluation, for its first node; the converted checkpoint is removed at the end. Raises ConfigError."""
    job = EvaluationJob.load(config.run_folder)
    model_folder = config.run_folder / job.model_folder  # read once: a later launch of the job has another
    try:
        yield CheckpointEvaluation(config, job.checkpoint, job.output_file)
    finally:
        shutil.rmtree(model_folder, ignore_errors=True)
