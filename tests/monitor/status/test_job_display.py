"""The output of a running job: a table that fits a terminal of 80 columns, and lines elsewhere."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.monitor.status.job_display import JobLines, JobTable, job_display
from megatron_webrl.monitor.status.role_groups import RoleLine
from tests.monitor.status.made_runs import updates
from tests.terminal import Terminal

PHASES = ("waiting for weights", "version 6: 3 groups running, 40 episodes done", "version 6, waiting for new weights")


def make_roles(count: int) -> list[RoleLine]:
    """The control service, a trainer, and `count` workers in all states and phases."""
    workers = [
        RoleLine(f"rollout-{n}", "silent" if n % 40 == 39 else "starting" if n % 11 == 10 else "running",
                 f"{PHASES[n % 3]}{' and on' * (n % 5)}", restarts=n % 7 // 6)
        for n in range(count)
    ]  # fmt: skip
    trainer = RoleLine("trainer-0", "running", "update 13: waiting for groups, 3 of 8")
    return [RoleLine("control", "running", "groups: 3 in progress, 50 started of 50 allowed"), trainer, *workers]


def rendered(roles: list[RoleLine], versions: int) -> list[str]:
    """The lines of the table after some updates, one every ten seconds."""
    out, now = io.StringIO(), time.time()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    table = JobTable(console, "run " + "quickstart" * 9, 40, group_size=8)
    table._started_at = now - 10 * versions - 5
    table._updates.extend(updates(versions, now, seconds=10.0, wait=3.0))
    console.print(table.render(roles, now))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("count", [1, 8, 128])
@pytest.mark.parametrize("versions", [0, 1, 12, 40])
def test_the_table_fits_80_columns_and_20_lines_with_any_number_of_roles(count: int, versions: int):
    lines = rendered(make_roles(count), versions)
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert f"update {versions} of 40" in text
    assert "waiting for groups, 3 of 8" in text
    assert "50 started of 50" in text
    assert ("left" in lines[0]) == (0 < versions < 40)
    if versions > 1:
        assert "success" in text
        assert "last 10 updates" in text or versions < 10
    if versions == 12:
        assert "4 min 40 s left" in lines[0]
    if count == 128:
        assert "114 rollout" in text
        assert "of 114: " in text, "how many of the running workers the shown status is of"
        assert {"silent", "starting", "running"} <= set(text.split())


def test_texts_of_roles_cannot_control_the_terminal():
    hostile = "\x1b[2J\x1b]0;owned\x07 [bold red]x[/] \u202e line\nline\r over"
    role = RoleLine("rollout-0", "running", hostile)
    text = "\n".join(rendered([role], 3))
    assert not set(text) & set("\x1b\x07\r\u202e")
    assert "\\x1b[2J" in text
    assert "[bold red]x[/]" in text
    out = io.StringIO()
    with JobLines(Console(file=out, width=80)) as lines:
        lines.show([role], [])
    assert "\x1b" not in out.getvalue()


@contextmanager
def terminal_console(
    monkeypatch: pytest.MonkeyPatch, columns: int = 80, **variables: str
) -> Iterator[tuple[Terminal, Console]]:
    for name in ("CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": str(columns)} | variables).items():
        monkeypatch.setenv(name, value)
    terminal = Terminal(columns)
    with open(terminal.slave, "w", closefd=False) as file:
        yield terminal, Console(file=file)


@pytest.mark.parametrize(
    ("columns", "variables", "has_table"),
    [
        (80, {}, True),
        (200, {"NO_COLOR": "1"}, True),
        (79, {}, False),
        (80, {"TERM": "dumb"}, False),
        (80, {"CI": "true"}, False),
    ],
)
def test_a_terminal_that_can_show_it_gets_a_table_and_others_lines(
    monkeypatch: pytest.MonkeyPatch, columns: int, variables: dict[str, str], has_table: bool
):
    roles = make_roles(2)
    with terminal_console(monkeypatch, columns, **variables) as (terminal, console):
        with suppress(JobFailed), job_display(console, Config()) as display:
            display.show(roles, [])
            console.print("an important line", markup=False)
            display.show(roles, updates(1, time.time()))
            raise JobFailed("the table is left in the middle of the job")
        console.print("the report")
        console.file.flush()
        screen = terminal.finish()
    assert screen.cursor_visible
    lines = [line.rstrip() for line in screen.lines if line.strip()]
    if has_table:
        assert lines == ["an important line", "the report"], "the table is gone, and nothing of it is left"
        assert "\x1b[?25l" in terminal.output
        assert 8 <= screen.tallest < 20
        assert ("\x1b[36m" in terminal.output) == ("NO_COLOR" not in variables)
    else:
        assert "\x1b[?25l" not in terminal.output
        assert "[trainer-0] update 13: waiting for groups, 3 of 8" in lines
        assert lines[-1] == "the report"


def test_a_pipe_gets_lines_even_if_colours_are_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(job_display(Console(file=io.StringIO()), Config()), JobLines)


def test_a_log_gets_one_line_per_update_and_per_phase():
    out = io.StringIO()
    waiting = RoleLine("trainer-0", "running", "update 1: waiting for groups, 0 of 8")
    with JobLines(Console(file=out, width=80)) as lines:
        lines.show([RoleLine("control", "running", "groups: 0 in progress"), waiting], [])
        lines.show([replace(waiting, status="update 1: waiting for groups, 3 of 8")], updates(1, 0.0))
        lines.show([replace(waiting, status="update 2: waiting for groups, 0 of 8")], [])
    found = out.getvalue().splitlines()
    assert [line.split()[0] for line in found] == ["[trainer-0]", "update", "[trainer-0]"]


def test_a_log_repeats_a_long_phase_whose_counts_change():
    out = io.StringIO()
    with JobLines(Console(file=out, width=80), log_seconds=0) as lines:
        for count in (0, 3, 3):
            lines.show([RoleLine("rollout-0", "running", f"version 0: {count} episodes done")], [])
    assert out.getvalue().splitlines() == [f"[rollout-0] version 0: {count} episodes done" for count in (0, 3)]
