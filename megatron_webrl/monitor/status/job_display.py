"""The output of `webrl train` while its job runs: a live table on a terminal, lines in a log.

On a terminal of at least MIN_COLUMNS the table stays at the bottom, and what the launcher prints scrolls above it; a
pipe, a dumb or narrow terminal, and a CI system (CI is set) get lines.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.status.page import COLOURS, duration
from megatron_webrl.monitor.status.progress import WINDOW, Progress, expected_end, recent_progress
from megatron_webrl.monitor.status.role_groups import CONTROL, RoleGroup, RoleLine, group_roles
from megatron_webrl.track.tables import UPDATE_COLUMNS, updates_table
from megatron_webrl.util.text import printable

MIN_COLUMNS = 80
SHOWN_UPDATES = 3
SHOWN_GROUPS = 7  # of roles
NAME_COLUMNS = 24
REFRESH_SECONDS = 1.0
LOG_SECONDS = 60.0


class JobLines:
    """A line per update and per change of a role's phase.

    Counts within a phase change constantly: a role whose status differs has another line after `log_seconds`.
    """

    def __init__(self, console: Console, log_seconds: float = LOG_SECONDS) -> None:
        self.console, self.log_seconds = console, log_seconds
        self._shown: dict[str, tuple[str, float]] = {}  # status of a role, with the monotonic time of its line

    def __enter__(self) -> JobLines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to close."""

    def show(self, roles: Sequence[RoleLine], updates: Sequence[Mapping[str, Any]]) -> None:
        """`updates`: those since the last call."""
        for role in roles:
            if role.name != CONTROL and self._is_due(role):
                self._shown[role.name] = role.status, time.monotonic()
                self._print(f"[{role.name}] {printable(role.status)}")
        for update in updates:
            cells = "  ".join(f"{name.replace(chr(10), ' ')} {render(update)}" for name, render in UPDATE_COLUMNS)
            self._print(f"update {cells}")

    def _is_due(self, role: RoleLine) -> bool:
        shown, shown_at = self._shown.get(role.name, ("", 0.0))
        if not role.status or role.status == shown:
            return False
        return _phase(role.status) != _phase(shown) or time.monotonic() - shown_at >= self.log_seconds

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class JobTable:
    """Progress, figures, the last updates and the roles, redrawn in place; it vanishes at the end."""

    def __init__(self, console: Console, name: str, target_updates: int | None, group_size: int) -> None:
        """`target_updates`: None for a job without updates."""
        self._name, self._target, self._group_size = name, target_updates, group_size
        self._started_at = time.time()
        self._updates: deque[Mapping[str, Any]] = deque(maxlen=WINDOW + 1)  # one more, from which the first one counts
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def __enter__(self) -> JobTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, roles: Sequence[RoleLine], updates: Sequence[Mapping[str, Any]]) -> None:
        """`updates`: those since the last call."""
        self._updates.extend(updates)
        if updates or time.monotonic() - self._drawn_at >= REFRESH_SECONDS:
            self._drawn_at = time.monotonic()
            self._live.update(self.render(roles, time.time()), refresh=True)

    def render(self, roles: Sequence[RoleLine], now: float) -> RenderableType:
        """The table at a unix time: at most 20 lines."""
        updates = list(self._updates)
        progress = recent_progress(updates, self._group_size, self._started_at)
        parts = [_headline(self._name, self._target, updates, progress, self._started_at, now)]
        if progress is not None:
            parts += [Text(""), _figures(progress)]
        if updates:
            table = updates_table(updates[-SHOWN_UPDATES:])
            table.show_edge = False
            parts += [Text(""), table]
        if roles:
            workers_last = sorted(roles, key=lambda role: role.kind.startswith("rollout"))
            parts += [Text(""), _roles(group_roles(workers_last, SHOWN_GROUPS))]
        return Group(*parts)


def job_display(console: Console, config: Config, trains: bool = True) -> JobTable | JobLines:
    """A table where the console is a terminal that can show it; `trains`: whether the job makes updates."""
    if not console.file.isatty() or not console.is_interactive or console.width < MIN_COLUMNS or os.environ.get("CI"):
        return JobLines(console)
    return JobTable(
        console, f"run {config.run.name}", config.trainer.updates if trains else None, config.rollout.group_size
    )


def _headline(
    name: str,
    target: int | None,
    updates: Sequence[Mapping[str, Any]],
    progress: Progress | None,
    started_at: float,
    now: float,
) -> RenderableType:
    elapsed = duration(now - started_at)
    cells: list[RenderableType] = [Text(name, style="bold")]
    if target is not None:
        version = int(updates[-1]["version"]) if updates else 0
        cells += [ProgressBar(total=target, completed=version), Text(f"update {version} of {target}")]
        if progress is not None and version < target:
            elapsed += f", {duration(expected_end(progress, updates[-1], target, now) - now)} left"
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=NAME_COLUMNS)
    for cell in cells[1:]:
        grid.add_column(no_wrap=True, ratio=1 if isinstance(cell, ProgressBar) else None)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(*cells, Text(elapsed))
    return grid


def _figures(progress: Progress) -> RenderableType:
    mismatch = progress.logprob_mismatch_max
    figures = {
        f"last {progress.updates} updates" if progress.updates > 1 else "last update": "",
        "success": "-" if progress.success is None else f"{progress.success:.1%}",
        "reward": f"{progress.reward_mean:.3f}",
        "mismatch": "-" if mismatch is None else f"{mismatch:.0e}",
        "staleness": f"{progress.staleness_mean:.1f} ({progress.staleness_max})",
        "tokens/s": f"{progress.tokens_per_second:.0f}",
        "waiting": f"{progress.wait_fraction:.0%}",
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name in figures:
        grid.add_column(justify="right" if figures[name] else "left", no_wrap=True)
    grid.add_row(*(Text(name, style="dim") for name in figures))
    grid.add_row(*(Text(value, style="bold") for value in figures.values()))
    return grid


def _roles(groups: Sequence[RoleGroup]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for width in (NAME_COLUMNS, 12):
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=width)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for group in groups:
        restarts = f"restarts {group.restarts}; " if group.restarts else ""
        state = Text(group.state, style=COLOURS.get(group.state, ""))
        name = group.name if len(group.name) <= NAME_COLUMNS else f"{len(group.roles)} {group.roles[0].kind}"
        grid.add_row(Text(name, style="cyan"), state, Text(" ".join((restarts + group.status).split())))
    return grid


def _phase(status: str) -> str:
    return re.split("[:,]", status)[0]
