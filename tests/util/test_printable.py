"""Text of the web on terminals: nothing in it acts."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.control import child_process
from megatron_webrl.track.events import EventLog, read_events
from megatron_webrl.util.text import RedactingFormatter, printable

TITLES = [
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[1;1H",
    "a\rb",
    "\x9b31m",
    "\x90q\x9c",
    "\u202egnp.exe",
    "a\x08b",
    "\u2028",
    "\x00",
]


@pytest.mark.parametrize("title", TITLES)
def test_logs_messages_and_events_show_control_characters_and_do_not_send_them(title: str, tmp_path: Path) -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "the page %s failed", (f"shop {title}",), None)
    EventLog(tmp_path).add("worker-0", "failed", f"title: {title}")
    [event] = read_events(tmp_path)
    for text in (
        RedactingFormatter("%(message)s").format(record),
        event.reason,
        child_process.last_line(f"ERROR {title}x"),
    ):
        assert text.isprintable(), ascii(text)
    assert "shop " in RedactingFormatter("%(message)s").format(record)


@given(st.text())
def test_printable_text_keeps_all_but_the_characters_that_act(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert not any(
        (ord(character) < 32 and character not in "\t\n") or 127 <= ord(character) < 160 for character in shown
    )
    if text.isascii() and text.isprintable():
        assert shown == text


def test_a_refused_command_line_sends_nothing_to_the_terminal(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text('browser: {executable: "\\e]0;owned\\a"}\n')
    command = [sys.executable, "-m", "megatron_webrl", "browsers", "serve", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "browser.executable=\\x1b]0;owned\\x07 is not an executable file" in done.stderr
