"""The report at the end of a job, with the same lines as `webrl status`."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from megatron_webrl.monitor.status import page
from megatron_webrl.monitor.status.report import build_report
from megatron_webrl.track import evaluations, summary, tables
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.tables import UPDATE_LEGEND, updates_table

WIDTH = 120  # of tables in the log of a Slurm job


def print_final_report(folder: Path, outcome: str, console: Console, table: bool) -> None:
    """Print evaluations, events and the report of a run whose job has ended; with `table` all its updates, too.

    Without a summary, as the file system of the run has failed, it prints the outcome and the newest checkpoint.
    """
    try:
        content, report = summary.read_summary(folder), build_report(folder)
    except OSError as error:
        console.print(_without_summary(folder, outcome, error), markup=False, highlight=False, soft_wrap=True)
        return
    if table and content["updates"]:
        console.print(updates_table(content["updates"]))
        console.print(UPDATE_LEGEND, style="dim")
    evaluation = content["evaluation"]
    if measured := [evaluation[name] for name in evaluations.NAMES if evaluation[name]]:
        console.print(tables.evaluation_table(measured))
        console.print(tables.EVALUATION_LEGEND, style="dim")
        for line in (*tables.rates_lines(measured), *tables.gain_lines(evaluation)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if notable := page.notable_events(report):
        console.print(page.events_table(notable[-page.SHOWN_EVENTS :]))
    page.print_lines(report, console)


def _without_summary(folder: Path, outcome: str, error: OSError) -> str:
    try:
        checkpoint = str(find_latest_checkpoint(folder) or "none")
    except OSError as unknown:
        checkpoint = f"unknown ({unknown.strerror})"
    return f"{outcome}; newest checkpoint: {checkpoint}; no summary: {error}"


def final_report_lines(folder: Path, outcome: str) -> list[str]:
    """The report as lines for a log, without the table of updates."""
    text = StringIO()
    print_final_report(folder, outcome, Console(file=text, width=WIDTH), table=False)
    return [stripped for line in text.getvalue().splitlines() if (stripped := line.rstrip())]
