"""The output of `webrl train` while its job runs: a row for each update, and what the roles do.

On a terminal that is a status line below what the launcher prints; elsewhere (a pipe, a dumb or narrow terminal, and
where CI is set) a line for each phase of a role.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.progress import WINDOW, expected_end, recent_progress
from megatron_webrl.monitor.roles import CONTROL, RoleStatus, role_rows
from megatron_webrl.monitor.status import duration, update_line
from megatron_webrl.util.text import printable

MIN_COLUMNS = 80
SHOWN_ROLES = 4  # rows of similar processes below the status line
REFRESH_SECONDS = 1.0
HEADER_UPDATES = 20  # between two headers of the rows


def _success(update: Mapping[str, Any]) -> str:
    sampled = update["extra"].get("rollout_success_rate")
    return "-" if sampled is None else f"{sampled:.1%}"


UPDATE_COLUMNS: tuple[tuple[tuple[str, str], int, Callable[[Mapping[str, Any]], str]], ...] = (
    (("", "ver"), 4, lambda u: str(u["version"])),
    (("", "grp"), 3, lambda u: str(u["groups"])),
    (("", "success"), 7, _success),
    (("", "steps"), 5, lambda u: f"{u['steps_mean']:.2f}"),
    (("tok", "/step"), 5, lambda u: f"{u['response_tokens_mean']:.1f}"),
    (("stale", "(max)"), 7, lambda u: f"{u['staleness_mean']:.1f} ({u['staleness_max']})"),
    (("", "clip"), 5, lambda u: f"{u['clip_fraction']:.1%}"),
    (("", "gap"), 5, lambda u: "-" if u["logprob_mismatch_max"] is None else f"{u['logprob_mismatch_max']:.0e}"),
    (("tok", "/s"), 5, lambda u: f"{u['tokens_per_second']:.0f}"),
    (("roll", "out s"), 5, lambda u: f"{u['seconds']['rollout']:.1f}"),
    (("train", "s"), 5, lambda u: f"{u['seconds']['train']:.1f}"),
    (("sync", "s"), 4, lambda u: f"{u['seconds']['sync']:.2f}"),
    (("wait", "s"), 5, lambda u: f"{u['seconds']['wait']:.1f}"),
)
"""Header in two lines, columns of text, and the cell of an update (docs/quickstart.md)."""


class JobDisplay:
    """A context; call `show` often. What else is printed to the console scrolls above the status line."""

    def __init__(self, console: Console, config: Config, trains: bool = True, log_seconds: float = 60.0) -> None:
        """`trains`: whether the job makes updates. `log_seconds`: after which counts within a phase have a new line."""
        self.console, self._config, self._trains, self._log_seconds = console, config, trains, log_seconds
        self._started_at, self._drawn_at = time.time(), 0.0
        self._updates: deque[Mapping[str, Any]] = deque(maxlen=WINDOW + 1)  # one more, from which the first one counts
        self._phases: dict[str, tuple[str, float]] = {}  # status of a role, with the monotonic time of its line
        terminal = console.file.isatty() and console.is_interactive and console.width >= MIN_COLUMNS
        shows_line = terminal and not os.environ.get("CI")
        self.live = Live(console=console, auto_refresh=False, transient=True) if shows_line else None
        self._shown_updates = 0

    def __enter__(self) -> JobDisplay:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, roles: Sequence[RoleStatus], updates: Sequence[Mapping[str, Any]]) -> None:
        """`updates`: those since the last call."""
        for update in updates:
            self._updates.append(update)
            if self._shown_updates % HEADER_UPDATES == 0:
                for line in (0, 1):
                    self._print(" ".join(header[line].rjust(width) for header, width, _ in UPDATE_COLUMNS))
            self._shown_updates += 1
            self._print(" ".join(cell(update).rjust(width) for _, width, cell in UPDATE_COLUMNS))
        if self.live is None:
            self._print_phases(roles)
        elif updates or time.monotonic() - self._drawn_at >= REFRESH_SECONDS:
            self._drawn_at = time.monotonic()
            self.live.update(self.render(roles, time.time()), refresh=True)

    def render(self, roles: Sequence[RoleStatus], now: float) -> Text:
        """The status line and a few rows of roles, at a unix time."""
        updates, target = list(self._updates), self._config.trainer.updates
        progress = recent_progress(updates, self._config.rollout.group_size, self._started_at)
        version = int(updates[-1]["version"]) if updates else 0
        end = expected_end(progress, updates[-1], target, now) if progress else None
        facts = [f"update {update_line(version, target, end, now)}"] if self._trains else []
        facts += [f"{duration(now - self._started_at)} so far", *([str(progress)] if progress else [])]
        rows = [" ".join(f"{name} {state if state != 'running' else ''} {status}".split())
                for name, _, state, _, _, status in role_rows(roles)]  # fmt: skip
        if len(rows) > SHOWN_ROLES:
            states = Counter(role.state for role in roles)
            rows = [*rows[: SHOWN_ROLES - 1], ", ".join(f"{count} {state}" for state, count in states.items())]
        width = self.console.width
        lines = [f"{self._config.run.name}: {'; '.join(facts)}"[: 2 * width], *(row[:width] for row in rows)]
        return Text("\n".join(lines), overflow="fold")

    def _print_phases(self, roles: Sequence[RoleStatus]) -> None:
        for role in roles:
            shown, shown_at = self._phases.get(role.name, ("", 0.0))
            is_due = _phase(role.status) != _phase(shown) or time.monotonic() - shown_at >= self._log_seconds
            if role.name != CONTROL and role.status and role.status != shown and is_due:
                self._phases[role.name] = role.status, time.monotonic()
                self._print(f"[{role.name}] {printable(role.status)}")

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _phase(status: str) -> str:
    return re.split("[:,]", status)[0]
