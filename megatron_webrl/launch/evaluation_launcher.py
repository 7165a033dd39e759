"""`webrl eval`: success rate of a checkpoint on held-out tasks, with engines and browsers on this machine."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from megatron_webrl.config.schema import Config
from megatron_webrl.launch import role_process
from megatron_webrl.launch.checkpoint_evaluation import CheckpointEvaluation, EvaluationProgress
from megatron_webrl.launch.evaluated_checkpoint import EvaluatedCheckpoint, check_output_file
from megatron_webrl.launch.local_launcher import LocalLauncher
from megatron_webrl.track.tables import progress_bar


def run_evaluation(checkpoint: EvaluatedCheckpoint, config: Config, console: Console, file: Path | None) -> int:
    """Evaluate, print a table, write JSON to `file` and metrics to MLflow; returns the exit code.

    0: done; 1: failed, episodes are missing, or the judge's budget is spent; 130: interrupted. Raises ConfigError for
    an unwritable file, a folder in use and incomplete weights.
    """
    check_output_file(file)
    role_process.check_ended(config)
    launcher = EvaluationLauncher(config, console, checkpoint=checkpoint, output_file=file)
    if checkpoint.is_megatron:
        try:
            launcher.convert_checkpoint()
        except BaseException:  # Ctrl-C and SIGTERM included
            shutil.rmtree(launcher.scratch, ignore_errors=True)
            raise
    return launcher.run()


@dataclass
class EvaluationLauncher(LocalLauncher):
    """A job without a trainer: submits evaluation requests to the workers and collects their results."""

    checkpoint: EvaluatedCheckpoint = field(kw_only=True)
    output_file: Path | None = None
    evaluation: CheckpointEvaluation | None = None  # set with the control service

    def convert_checkpoint(self) -> None:
        """Convert the Megatron checkpoint to a temporary Hugging Face folder for the engines."""
        folder = self.scratch / "model"
        with self.console.status(f"converting {self.checkpoint.path}") if self.console.is_terminal else nullcontext():
            self.checkpoint.convert(folder)
        self.config.model = replace(self.config.model, path=str(folder))

    def _supervise(self) -> str:
        control = self._start_control()
        self._start_workers()
        self.evaluation = CheckpointEvaluation(self.config, self.checkpoint, self.output_file)
        with progress_bar(self.console) as bar:
            shown: dict[str, TaskID] = {}
            outcome = self.evaluation.run(
                control, lambda: self._outcome(control), lambda progress: _update_bar(bar, shown, progress)
            )
        return self._end(control, outcome)

    def _print_result(self, outcome: str) -> int:
        if self.evaluation is not None and self.evaluation.complete:
            self.evaluation.print_results(self.console)
        if outcome == "finished":
            return 0
        reason = outcome if self.evaluation is None else self.evaluation.describe_outcome(outcome)
        self.console.print(reason, style="bold red", markup=False, soft_wrap=True)
        return 130 if outcome == "interrupted" else 1


def _update_bar(bar: Progress, shown: dict[str, TaskID], progress: EvaluationProgress) -> None:
    if progress.kind not in shown:
        shown[progress.kind] = bar.add_task("starting", total=progress.episodes)
    bar.update(shown[progress.kind], completed=len(progress.results), description=progress.status or progress.kind)
