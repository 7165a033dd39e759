"""`webrl eval`: success rate of a checkpoint on held-out tasks, with engines and browsers on this machine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from rich.console import Console

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.evaluation import evaluation_queue, result_files, result_table
from megatron_webrl.evaluation.evaluation_queue import EvaluationRequest, EvaluationResult, ResultCollector
from megatron_webrl.evaluation.results import aggregate_results, mlflow_metrics, paired_difference
from megatron_webrl.launch.local_launcher import POLL_SECONDS, LocalLauncher
from megatron_webrl.launch.validation import check_config
from megatron_webrl.model.convert.conversion import HF_FOLDER, ConversionOptions, find_checkpoint, megatron_to_hf
from megatron_webrl.system.text import first_line
from megatron_webrl.tracking.dashboard import progress_bar
from megatron_webrl.tracking.mlflow_run import MLflowTracker

SHARD_BYTES = 5 * 10**9


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
            checkpoint = find_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
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


def evaluation_config(checkpoint: EvaluatedCheckpoint, arguments: Sequence[str]) -> Config:
    """Parse `arguments`: a file (default: the run's own), then overrides; it has its own folder. Raises ConfigError."""
    file = Path(arguments[0]) if arguments and "=" not in arguments[0] else None
    overrides = list(arguments if file is None else arguments[1:])
    config = parse_config(file or checkpoint.run_config_path, overrides)
    config.run = replace(config.run, name=f"{config.run.name}-evaluation", resume=False)
    folder = checkpoint.path / HF_FOLDER if checkpoint.is_megatron else checkpoint.path
    config.model = replace(config.model, path=str(folder), checkpoint="")
    config.trainer.warm_start.demonstrations = 0
    config.evaluation = replace(config.evaluation, before=False, after=True, every=0)
    check_config(config)
    return config


def run_evaluation(checkpoint: EvaluatedCheckpoint, config: Config, console: Console, file: Path | None) -> int:
    """Evaluate, print a table, write JSON to `file` and metrics to MLflow; returns the exit code.

    0: done; 1: failed; 130: interrupted. Raises ConfigError for an unwritable file and for incomplete weights.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--json={file}: {file.absolute().parent} is not a folder")
    launcher = EvaluationLauncher(config, console, checkpoint=checkpoint, output_file=file)
    if not checkpoint.is_megatron:
        return launcher.run()
    try:
        launcher.convert_checkpoint()
    except ValueError as error:
        shutil.rmtree(launcher.scratch, ignore_errors=True)
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        shutil.rmtree(launcher.scratch, ignore_errors=True)
        return 130
    return launcher.run()


@dataclass
class EvaluationLauncher(LocalLauncher):
    """A job without a trainer: submits evaluation requests to the workers and collects their results."""

    checkpoint: EvaluatedCheckpoint = field(kw_only=True)
    output_file: Path | None = None
    summaries: list[dict[str, Any]] = field(default_factory=list)
    results: list[list[EvaluationResult]] = field(default_factory=list)  # by summary

    def convert_checkpoint(self) -> None:
        """Convert the Megatron checkpoint to a temporary Hugging Face folder for the engines."""
        folder = self.scratch / "model"
        with self.console.status(f"converting {self.checkpoint.path}") if self.console.is_terminal else nullcontext():
            megatron_to_hf(self.checkpoint.path, folder, SHARD_BYTES, ConversionOptions())
        self.config.model = replace(self.config.model, path=str(folder))

    def _supervise(self) -> str:
        control, outcome = self._start_control(), None
        self._start_workers(control, "--evaluation-only")
        for number, kind in enumerate(self._kinds(), 1):
            if (outcome := self._evaluate(control, number, kind)) is not None:
                break
        else:
            outcome = self._store_results()
        return self._end(control, outcome)

    def _kinds(self) -> list[str]:
        return ["checkpoint", *(["blank_images"] if self.config.evaluation.blank_images else [])]

    def _evaluate(self, control: ControlClient, number: int, kind: str) -> str | None:
        """Run one evaluation; returns the outcome of the job if it ended early."""
        settings = self.config.evaluation
        tasks = settings.episodes * len(self.config.tasks.environments)
        request = EvaluationRequest(
            number, kind, tasks, settings.samples, settings.temperature, self.checkpoint.version, exclusive=True
        )
        evaluation_queue.submit_request(control, request)
        collector, started_at = ResultCollector(control, request), None
        with progress_bar(self.console) as bar:
            task = bar.add_task("starting", total=request.episodes)
            while not collector.poll():
                if (outcome := self._outcome(control)) is not None:
                    return outcome
                started_at = started_at or (time.monotonic() if collector.has_started else None)
                if started_at is not None and time.monotonic() > started_at + evaluation_queue.TIMEOUT_SECONDS:
                    break
                status = control.status_of(self.config.worker_names[0]) or "starting"
                description = kind.replace("_", " ") if started_at else status
                bar.update(task, completed=len(collector.results), description=description)
                time.sleep(POLL_SECONDS)
            bar.update(task, completed=len(collector.results), description=kind.replace("_", " "))
        evaluation_queue.withdraw_request(control)
        results = [collector.results[episode] for episode in sorted(collector.results)]
        now = time.monotonic()
        summary = aggregate_results(request, results, now - (started_at or now))
        result_files.append_evaluation(self.config.run_folder, summary, results)
        self.summaries.append(summary)
        self.results.append(results)
        return None

    def _store_results(self) -> str:
        """Write the results to the output file and to MLflow; returns the outcome of the job."""
        if self.output_file is not None:
            self.output_file.write_text(json.dumps(self._report(), indent=1) + "\n")
        try:
            tracker = MLflowTracker(self.config, None, str)  # shows no trajectories
            tracker.client.set_tag(tracker.run_id, "checkpoint", str(self.checkpoint.path))
            for summary in self.summaries:
                tracker.log_metrics(mlflow_metrics(summary), summary["version"])
            tracker.close("FINISHED")
        except MlflowException as error:
            return f"failed: MLflow at {self.config.tracking_uri} stored no metrics: {first_line(error)}"
        return "finished"

    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {"checkpoint": str(self.checkpoint.path), "evaluation": self.summaries[0]}
        report["episodes"] = [asdict(result) for result in self.results[0]]
        if len(self.summaries) > 1:
            report |= {"blank_images": self.summaries[1], "image_gain": self._image_gain()}
        return report

    def _image_gain(self) -> dict[str, Any] | None:
        return paired_difference(self.results[1], self.results[0]) if len(self.results) > 1 else None

    def _print_result(self, outcome: str) -> int:
        out = self.console
        if outcome != "finished":
            out.print(outcome, style="bold red", markup=False, soft_wrap=True)
            return 130 if outcome == "interrupted" else 1
        out.print(result_table.evaluation_table(self.summaries))
        out.print(result_table.LEGEND, style="dim")
        for entry in self.summaries[0]["pass_at"].items() if self.config.evaluation.samples > 1 else ():
            out.print("pass@{}: {:.1%}".format(*entry), highlight=False)
        if gain := self._image_gain():
            line = result_table.format_difference("with screenshots over blank images", gain)
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        path = self.output_file or self.config.run_folder / result_files.FILE
        out.print(f"results: {path}", markup=False, soft_wrap=True)
        return 0
