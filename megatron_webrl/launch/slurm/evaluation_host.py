"""`webrl node eval`: hosts the control service of an evaluation on several nodes, and collects its results."""

from __future__ import annotations

import shutil
import time
from io import StringIO

from rich.console import Console

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.checkpoint_evaluation import CheckpointEvaluation, EvaluationProgress
from megatron_webrl.launch.slurm.control_host import ControlHost
from megatron_webrl.launch.slurm.evaluation_job import EvaluationJob
from megatron_webrl.monitor.status.final_report import WIDTH

PROGRESS_SECONDS = 30.0  # between two lines about episodes


class EvaluationHost(ControlHost):
    """Submits the evaluations to the workers of all nodes, reports progress to the log, and stores the results."""

    effect_of_stop = "the evaluation ends without a result"
    successful_outcomes = ("finished",)

    def __init__(self, config: Config, host: str) -> None:
        """`host`: address of this node, as the other nodes reach it. Raises ConfigError without a prepared job."""
        super().__init__(config, host)
        job = EvaluationJob.load(config.run_folder)
        self.model_folder = config.run_folder / job.model_folder  # read once: a later launch of the job has another
        self.evaluation = CheckpointEvaluation(config, job.checkpoint, job.output_file)
        self.last_line, self.next_line_at = "", 0.0

    def run(self) -> int:
        """Run until the evaluation has ended; returns the exit code: 0 finished, 1 not, PREEMPTED_EXIT_CODE."""
        try:
            return super().run()
        finally:
            shutil.rmtree(self.model_folder, ignore_errors=True)

    def _host(self) -> str:
        control = self._start_control()
        outcome = self.evaluation.run(control, lambda: self._poll(control), self._show)
        control.end_job(outcome)
        self._await_control_exit()
        return outcome

    def _handle_signals(self, control: ControlClient) -> None:
        """End the job after a signal or a requested stop: a part of an evaluation is no result."""
        super()._handle_signals(control)
        if control.stop_requested():
            control.end_job(control.requested_outcome())

    def _show(self, progress: EvaluationProgress) -> None:
        """Report progress: a change of the status at once, that of episodes every PROGRESS_SECONDS."""
        done, now = len(progress.results), time.monotonic()
        line = f"{progress.kind}: {done} of {progress.episodes} episodes{_success(progress)}"
        if progress.status:
            line = f"{self.config.worker_names[0]}: {progress.status}"
        elif now < self.next_line_at and 0 < done < progress.episodes:
            return
        if line != self.last_line:
            self.last_line, self.next_line_at = line, now + PROGRESS_SECONDS
            self._report(line)

    def _final_report(self, outcome: str) -> list[str]:
        reason = [] if outcome == "finished" else [self.evaluation.describe_outcome(outcome)]
        if not self.evaluation.complete:
            return reason
        text = StringIO()
        self.evaluation.print_results(Console(file=text, width=WIDTH))
        return [stripped for line in text.getvalue().splitlines() if (stripped := line.rstrip())] + reason


def _success(progress: EvaluationProgress) -> str:
    """Success rate of the episodes so far, for the log; empty without a verdict."""
    outcomes = [result.outcome for result in progress.results.values() if result.has_verdict]
    return f", success {outcomes.count('success') / len(outcomes):.1%} of {len(outcomes)} judged" if outcomes else ""
