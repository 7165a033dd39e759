"""The output of a running job: a status that fits a terminal of 80 columns, and lines elsewhere."""

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
from megatron_webrl.monitor.job_display import HEADER_UPDATES, JobDisplay
from megatron_webrl.monitor.roles import RoleStatus
from tests.monitor.runs import updates
from tests.terminal import Terminal

PHASES = ("waiting for weights", "version 6: 3 groups running, 40 episodes done", "version 6, waiting for new weights")


def make_roles(count: int) -> list[RoleStatus]:
    """The control service, a trainer, and `count` workers in all states and phases."""
    workers = [
        RoleStatus(f"rollout-{n}", "silent" if n % 40 == 39 else "starting" if n % 11 == 10 else "running",
                 f"{PHASES[n % 3]}{' and on' * (n % 5)}", restarts=n % 7 // 6)
        for n in range(count)
    ]  # fmt: skip
    trainer = RoleStatus("trainer-0", "running", "update 13: waiting for groups, 3 of 8")
    return [RoleStatus("control", "running", "groups: 3 in progress, 50 started of 50 allowed"), trainer, *workers]


def rendered(roles: list[RoleStatus], versions: int) -> list[str]:
    """The lines below a job after some updates, one every ten seconds."""
    now, config = time.time(), Config()
    config.run.name, config.trainer.updates = "quickstart" * 3, 40
    display = JobDisplay(Console(file=io.StringIO(), width=80), config)
    display._started_at = now - 10 * versions - 5
    display._updates.extend(updates(versions, now, seconds=10.0, wait=3.0))
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system=None).print(display.render(roles, now))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("count", "versions"), [(1, 0), (8, 1), (8, 40), (128, 12)])
def test_the_status_fits_80_columns_and_a_few_lines_with_any_number_of_roles(count: int, versions: int):
    lines = rendered(make_roles(count), versions)
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 80
    text = "".join(lines)
    assert f"update {versions} of 40" in text
    assert "waiting for groups, 3 of 8" in text
    assert "50 started of 50" in text
    assert (" left" in text) == (0 < versions < 40)
    if versions == 12:
        assert "4 min 40 s left" in text
    if count == 128:
        assert lines[-1] == "116 running, 11 starting, 3 silent"


def test_texts_of_roles_cannot_control_the_terminal():
    hostile = "\x1b[2J\x1b]0;owned\x07 [bold red]x[/] \u202e line\nline\r over"
    role = RoleStatus("rollout-0", "running", hostile)
    text = "\n".join(rendered([role], 3))
    assert not set(text) & set("\x1b\x07\r\u202e")
    assert "\\x1b[2J" in text
    assert "[bold red]x[/]" in text
    out = io.StringIO()
    with JobDisplay(Console(file=out, width=80), Config()) as display:
        display.show([role], [])
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
    ("columns", "variables", "has_line"),
    [
        (80, {}, True),
        (200, {"NO_COLOR": "1"}, True),
        (79, {}, False),
        (80, {"TERM": "dumb"}, False),
        (80, {"CI": "true"}, False),
    ],
)
def test_a_terminal_that_can_show_it_gets_a_status_line_and_others_lines(
    monkeypatch: pytest.MonkeyPatch, columns: int, variables: dict[str, str], has_line: bool
):
    roles = make_roles(2)
    with terminal_console(monkeypatch, columns, **variables) as (terminal, console):
        with suppress(JobFailed), JobDisplay(console, Config()) as display:
            display.show(roles, [])
            console.print("an important line", markup=False)
            display.show(roles, updates(1, time.time()))
            raise JobFailed("the display is left in the middle of the job")
        console.print("the report")
        console.file.flush()
        screen = terminal.finish()
    assert screen.cursor_visible
    lines = [line.rstrip() for line in screen.lines if line.strip()]
    if has_line:
        assert [line.split()[0] for line in lines] == ["an", "tok", "ver", "1", "the"], "nothing else is left"
        assert "\x1b[?25l" in terminal.output
        assert "50 started of 50 allowed" in terminal.output
    else:
        assert "\x1b[?25l" not in terminal.output
        assert "[trainer-0] update 13: waiting for groups, 3 of 8" in lines
        assert lines[-1] == "the report"


def test_a_log_gets_one_line_per_update_and_phase_and_a_long_phase_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    waiting = RoleStatus("trainer-0", "running", "update 1: waiting for groups, 0 of 8")
    with JobDisplay(Console(file=out, width=80, no_color=True), Config()) as lines:
        assert lines.live is None
        lines.show([RoleStatus("control", "running", "groups: 0 in progress"), waiting], [])
        lines.show([replace(waiting, status="update 1: waiting for groups, 3 of 8")], updates(HEADER_UPDATES + 1, 0.0))
        lines.show([replace(waiting, status="update 2: waiting for groups, 0 of 8")], [])
    found = out.getvalue().splitlines()
    assert max(map(len, found)) <= 80
    first = [line.split()[0] for line in found]
    numbers = [str(n) for n in range(1, HEADER_UPDATES + 1)]
    assert first == ["[trainer-0]", "tok", "ver", *numbers, "tok", "ver", str(HEADER_UPDATES + 1), "[trainer-0]"]
    out = io.StringIO()
    with JobDisplay(Console(file=out, width=80), Config(), log_seconds=0) as lines:
        for count in (0, 3, 3):
            lines.show([RoleStatus("rollout-0", "running", f"version 0: {count} episodes done")], [])
    assert out.getvalue().splitlines() == [f"[rollout-0] version 0: {count} episodes done" for count in (0, 3)]
