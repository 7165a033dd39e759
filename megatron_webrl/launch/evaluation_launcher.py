"""`webrl eval`: the success of a checkpoint on held-out tasks. Engines and browsers of this machine, and no trainer.

The workers are those of a job, watched by its launcher; what a trainer would ask them for is asked here.
"""

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
from megatron_webrl.tracking.dashboard import progress_bar
from megatron_webrl.tracking.mlflow_run import MLflowTracker

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """What is evaluated: a Hugging Face folder, or a Megatron checkpoint that becomes one for the engines."""

    path: Path
    is_megatron: bool
    version: int  # of a run's checkpoint; 0 otherwise

    @classmethod
    def resolve(cls, path: Path) -> EvaluatedCheckpoint:
        """What a path means: a folder with weights, or the newest checkpoint of a run. Raises ConfigError."""
        if (path / "config.json").is_file():
            return cls(path, is_megatron=False, version=0)
        try:
            found = find_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        except ValueError as error:
            raise ConfigError(f"{path} is no Hugging Face folder (config.json), nor a checkpoint: {error}") from None
        state = found / "state.json"
        return cls(found, True, json.loads(state.read_text())["version"] if state.is_file() else 0)

    @property
    def run_config_path(self) -> Path:
        """Configuration of the run that a checkpoint lies in. Raises ConfigError without one."""
        path = self.path.resolve().parent.parent / "config.yaml"
        if not self.is_megatron or not path.is_file():
            raise ConfigError(f"{self.path} lies in no run's checkpoints; name a configuration after it")
        return path


def evaluation_config(checkpoint: EvaluatedCheckpoint, arguments: Sequence[str]) -> Config:
    """The configuration to evaluate with. `words`: a file, unless it is that of the checkpoint's run, and overrides.

    The run's name gets "-evaluation" added, for a folder of its own. Raises ConfigError.
    """
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
    """Evaluate, print a table, write `file` as JSON and the figures to MLflow; returns the exit code.

    0: done; 1: failed; 130: interrupted. Raises ConfigError for a file that cannot be written, and weights that are
    not whole.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--json={file}: {file.absolute().parent} is not a folder")
    examination = EvaluationLauncher(config, console, checkpoint=checkpoint, output_file=file)
    if not checkpoint.is_megatron:
        return examination.run()
    try:
        examination.convert_checkpoint()
    except ValueError as error:
        shutil.rmtree(examination.scratch, ignore_errors=True)
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        shutil.rmtree(examination.scratch, ignore_errors=True)
        return 130
    return examination.run()


@dataclass
class EvaluationLauncher(LocalLauncher):
    """A job of workers alone, whose results are collected here."""

    checkpoint: EvaluatedCheckpoint = field(kw_only=True)
    output_file: Path | None = None
    summaries: list[dict[str, Any]] = field(default_factory=list)
    results: list[list[EvaluationResult]] = field(default_factory=list)  # of each line

    def convert_checkpoint(self) -> None:
        """Write the Megatron checkpoint as a Hugging Face folder for the engines, removed at the end."""
        folder = self.scratch / "model"
        with self.console.status(f"converting {self.checkpoint.path}") if self.console.is_terminal else nullcontext():
            megatron_to_hf(self.checkpoint.path, folder, SHARD_BYTES, ConversionOptions())
        self.config.model = replace(self.config.model, path=str(folder))

    def _supervise(self) -> str:
        control, outcome = self._start_control(), None
        self._start_workers(control, "--evaluation-only")
        for number, kind in enumerate(self._kinds(), 1):
            if (outcome := self._examine(control, number, kind)) is not None:
                break
        else:
            outcome = self._keep()
        return self._end(control, outcome)

    def _kinds(self) -> list[str]:
        return ["checkpoint", *(["blank_images"] if self.config.evaluation.blank_images else [])]

    def _examine(self, control: ControlClient, number: int, kind: str) -> str | None:
        """Run one evaluation; returns how the job ended, if it did."""
        settings = self.config.evaluation
        tasks = settings.episodes * len(self.config.tasks.environments)
        request = EvaluationRequest(
            number, kind, tasks, settings.samples, settings.temperature, self.checkpoint.version, exclusive=True
        )
        evaluation_queue.submit_request(control, request)
        collector, begun = ResultCollector(control, request), None
        with progress_bar(self.console) as bar:
            shown = bar.add_task("starting", total=request.episodes)
            while not collector.poll():
                if (outcome := self._outcome(control)) is not None:
                    return outcome
                begun = begun or (time.monotonic() if collector.has_started else None)
                if begun is not None and time.monotonic() > begun + settings.timeout_seconds:
                    break
                words = (
                    kind.replace("_", " ") if begun else control.status_of(self.config.worker_names[0]) or "starting"
                )
                bar.update(shown, completed=len(collector.results), description=words)
                time.sleep(POLL_SECONDS)
            bar.update(shown, completed=len(collector.results), description=kind.replace("_", " "))
        evaluation_queue.withdraw_request(control)
        results = [collector.results[episode] for episode in sorted(collector.results)]
        line = aggregate_results(request, results, time.monotonic() - (begun or time.monotonic()))
        result_files.append_evaluation(self.config.run_folder, line, results)
        self.summaries.append(line)
        self.results.append(results)
        return None

    def _keep(self) -> str:
        """Write the results where they are wanted; returns the outcome."""
        if self.output_file is not None:
            self.output_file.write_text(json.dumps(self._report(), indent=1) + "\n")
        try:
            tracker = MLflowTracker(self.config, None, str)  # no trajectories are shown
            tracker.client.set_tag(tracker.run_id, "checkpoint", str(self.checkpoint.path))
            for line in self.summaries:
                tracker.log_metrics(mlflow_metrics(line), line["version"])
            tracker.close("FINISHED")
        except MlflowException as error:
            return f"failed: MLflow at {self.config.tracking_uri} took no figures: {str(error).splitlines()[0]}"
        return "finished"

    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {"checkpoint": str(self.checkpoint.path), "evaluation": self.summaries[0]}
        report["episodes"] = [asdict(result) for result in self.results[0]]
        if len(self.summaries) > 1:
            report |= {"blank_images": self.summaries[1], "image_gain": self._pixels()}
        return report

    def _pixels(self) -> dict[str, Any] | None:
        return paired_difference(self.results[1], self.results[0]) if len(self.results) > 1 else None

    def _farewell(self, outcome: str) -> int:
        out = self.console
        if outcome != "finished":
            out.print(outcome, style="bold red", markup=False, soft_wrap=True)
            return 130 if outcome == "interrupted" else 1
        out.print(result_table.evaluation_table(self.summaries))
        out.print(result_table.LEGEND, style="dim")
        for entry in self.summaries[0]["pass_at"].items() if self.config.evaluation.samples > 1 else ():
            out.print("pass@{}: {:.1%}".format(*entry), highlight=False)
        if pixels := self._pixels():
            line = result_table.format_difference("with screenshots over blank images", pixels)
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        where = self.output_file or self.config.run_folder / result_files.FILE
        out.print(f"results: {where}", markup=False, soft_wrap=True)
        return 0
