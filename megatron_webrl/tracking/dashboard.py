"""The terminal dashboard of a run: the table of updates, and the status of each role."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


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

MAX_ROWS = 50  # of the live table


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


def _phase(status: str) -> str:
    return re.split("[:,]", status)[0]


class TerminalDashboard:
    """A live table on a terminal; in a log, a line per update and per change of a role's phase.

    Counts within a phase change constantly: a role whose status differs has another line after `log_seconds`.
    """

    def __init__(self, console: Console, title: str, log_seconds: float = 60.0) -> None:
        self.console, self.title, self.log_seconds = console, title, log_seconds
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last_updates: deque[Mapping[str, Any]] = deque(maxlen=MAX_ROWS)
        self._shown_statuses: dict[str, tuple[str, float]] = {}  # of a role, with the monotonic time of its line

    def __enter__(self) -> TerminalDashboard:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, statuses: Mapping[str, str], updates: Sequence[Mapping[str, Any]]) -> None:
        """`updates`: those since the last call."""
        if self._live is not None:
            self._last_updates.extend(updates)
            self._live.update(self._render(statuses, list(self._last_updates)))
            return
        for role, status in statuses.items():
            if self._is_due(role, status):
                self._shown_statuses[role] = status, time.monotonic()
                self.console.print(f"[{role}] {status}", markup=False, highlight=False, soft_wrap=True)
        for update in updates:
            cells = "  ".join(f"{name.replace(chr(10), ' ')} {render(update)}" for name, render in UPDATE_COLUMNS)
            self.console.print(f"update {cells}", markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, role: str, status: str) -> bool:
        """Whether a log gets a line for a status."""
        shown, shown_at = self._shown_statuses.get(role, ("", 0.0))
        if not status or status == shown:
            return False
        return _phase(status) != _phase(shown) or time.monotonic() - shown_at >= self.log_seconds

    def _render(self, statuses: Mapping[str, str], updates: Sequence[Mapping[str, Any]]) -> RenderableType:
        roles = Table.grid(padding=(0, 2))
        for role, status in statuses.items():
            roles.add_row(Text(role, style="cyan"), Text(status))
        parts: list[RenderableType] = [Text(self.title, style="bold"), roles]
        return Group(*parts, updates_table(updates)) if updates else Group(*parts)
