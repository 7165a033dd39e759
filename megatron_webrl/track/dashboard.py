"""The table of updates, progress bars, and the line of the accounting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def _success(update: Mapping[str, Any]) -> str:
    sampled = update["extra"].get("rollout_success_rate")
    return "-" if sampled is None else f"{sampled:.1%}"


UPDATE_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("ver", lambda u: str(u["version"])),
    ("grp", lambda u: str(u["groups"])),
    ("success", _success),
    ("steps", lambda u: f"{u['steps_mean']:.2f}"),
    ("tok\n/step", lambda u: f"{u['response_tokens_mean']:.1f}"),
    ("stale\n(max)", lambda u: f"{u['staleness_mean']:.1f} ({u['staleness_max']})"),
    ("clip", lambda u: f"{u['clip_fraction']:.1%}"),
    ("gap", lambda u: "-" if u["logprob_mismatch_max"] is None else f"{u['logprob_mismatch_max']:.0e}"),
    ("tok\n/s", lambda u: f"{u['tokens_per_second']:.0f}"),
    ("roll\nout s", lambda u: f"{u['seconds']['rollout']:.1f}"),
    ("train\ns", lambda u: f"{u['seconds']['train']:.1f}"),
    ("sync\ns", lambda u: f"{u['seconds']['sync']:.2f}"),
    ("wait\ns", lambda u: f"{u['seconds']['wait']:.1f}"),
)
LEGEND = (
    "success: of all arrived episodes, including those of dropped groups; tok/step: response tokens; stale: versions, "
    "mean (max); clip: share of clipped tokens; gap: largest |log p(engine) - log p(trainer)| of tokens sampled under "
    "the same weights; tok/s: trained tokens by wall clock; rollout overlaps with train, sync and wait"
)


def updates_table(updates: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name, _ in UPDATE_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for update in updates:
        table.add_row(*(render(update) for _, render in UPDATE_COLUMNS))
    return table


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def accounting_line(accounting: Mapping[str, Any]) -> str:
    dropped = ", ".join(f"{name} {count}" for name, count in accounting["dropped"].items()) or "none"
    dropped_sum = sum(accounting["dropped"].values())
    rolled_back = accounting["rolled_back"]
    total = accounting["trained"] + dropped_sum + accounting["waiting"] + rolled_back
    rolled_back_term = f" + {rolled_back} rolled back" if rolled_back else ""
    verdict = "matches" if accounting["matches"] else "DOES NOT MATCH"
    return (
        f"episodes: {accounting['finished']} finished = {accounting['trained']} trained + "
        f"{dropped_sum} dropped ({dropped}) + {accounting['waiting']} waiting{rolled_back_term} = {total}: {verdict}"
    )
