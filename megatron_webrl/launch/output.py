"""What a job shows while it runs and at its end: on the console of its user, or in the log of a Slurm job.

Both are contexts in which the job runs; `print_end` follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TaskID

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.job_display import JobDisplay
from megatron_webrl.monitor.roles import RoleStatus
from megatron_webrl.monitor.status import print_final_report
from megatron_webrl.track.tables import progress_bar

if TYPE_CHECKING:  # it imports torch
    from megatron_webrl.launch.evaluation import CheckpointEvaluation, EvaluationProgress

PROGRESS_SECONDS = 30.0  # between two lines about episodes in a log
LOG_WIDTH = 120  # of tables in a log


class ConsoleOutput:
    """The console of `webrl train` and `webrl eval`."""

    def __init__(
        self, config: Config, console: Console, evaluation: CheckpointEvaluation | None = None, trains: bool = True
    ) -> None:
        """`evaluation`: of a job without a trainer; `trains`: whether the job makes updates."""
        self.config, self.console, self.evaluation, self.trains = config, console, evaluation, trains
        self._shown = ExitStack()
        self._display: JobDisplay | None = None
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> None:
        if self.evaluation is None:
            self._display = JobDisplay(self.console, self.config, self.trains)
            self._shown.enter_context(self._display)
        else:
            self._bar = self._shown.enter_context(progress_bar(self.console))

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def report(self, message: str) -> None:
        """Show a message."""
        self.console.print(message, style="yellow", markup=False, soft_wrap=True)

    def show(self, updates: Sequence[Mapping[str, Any]], read_roles: Callable[[], Sequence[RoleStatus]]) -> None:
        """Show the updates since the last call, and the roles."""
        if self._display is not None:
            self._display.show(read_roles(), updates)

    def show_evaluation(self, progress: EvaluationProgress) -> None:
        """Show what an evaluation has so far."""
        if self._bar is None:
            return
        if progress.kind not in self._tasks:
            self._tasks[progress.kind] = self._bar.add_task("starting", total=progress.episodes)
        description = progress.status or progress.kind
        self._bar.update(self._tasks[progress.kind], completed=len(progress.results), description=description)

    def print_end(self, outcome: str) -> None:
        """Show the results and the outcome of the job."""
        if self.evaluation is None:
            print_final_report(self.config.run_folder, outcome, self.console)
        else:
            self.evaluation.print_end(outcome, self.console)


class LogOutput:
    """Lines of the log of a Slurm job; the methods are those of ConsoleOutput."""

    def __init__(self, config: Config, evaluation: CheckpointEvaluation | None = None) -> None:
        self.config, self.evaluation = config, evaluation
        self._last_line, self._next_line_at = "", 0.0

    def __enter__(self) -> None:
        """Nothing to open."""

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def report(self, message: str) -> None:
        sys.stdout.write(f"job: {message}\n")
        sys.stdout.flush()

    def show(self, updates: Sequence[Mapping[str, Any]], read_roles: Callable[[], Sequence[RoleStatus]]) -> None:
        for update in updates:
            success = update["extra"].get("rollout_success_rate")
            rate = "" if success is None else f", success {success:.1%}"
            speed = f"{update['tokens_per_second']:.0f} tokens/s"
            wait = f"waited {update['seconds']['wait']:.1f} s for groups"
            self.report(f"update {update['version']} of {self.config.trainer.updates}{rate}, {speed}, {wait}")

    def show_evaluation(self, progress: EvaluationProgress) -> None:
        """Show a change of the status at once, that of episodes every PROGRESS_SECONDS."""
        done, now = len(progress.results), time.monotonic()
        verdicts = [result.outcome for result in progress.results.values() if result.has_verdict]
        rate = verdicts.count("success") / max(1, len(verdicts))
        success = f", success {rate:.1%} of {len(verdicts)} judged" if verdicts else ""
        line = f"{progress.kind}: {done} of {progress.episodes} episodes{success}"
        if progress.status:
            line = f"{self.config.worker_names[0]}: {progress.status}"
        elif now < self._next_line_at and 0 < done < progress.episodes:
            return
        if line != self._last_line:
            self._last_line, self._next_line_at = line, now + PROGRESS_SECONDS
            self.report(line)

    def print_end(self, outcome: str) -> None:
        text = StringIO()
        ConsoleOutput(self.config, Console(file=text, width=LOG_WIDTH), self.evaluation).print_end(outcome)
        for line in filter(None, map(str.rstrip, text.getvalue().splitlines())):
            self.report(line)
