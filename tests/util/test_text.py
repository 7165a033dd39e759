"""Texts of messages, logs and metric names: without secrets, and without characters that act on a terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

from megatron_webrl import cli
from megatron_webrl.control import child_process
from megatron_webrl.track.events import EventLog, read_events
from megatron_webrl.util.text import (
    RedactingFormatter,
    declare_secret,
    first_line,
    metric_label,
    printable,
    redact,
    shorten_middle,
)

FORMATTER = RedactingFormatter("%(message)s")
ACTIVE = "\x1b]0;owned\x07 \x1b[2J\x1b[1;1H a\rb \x9b31m \x90q\x9c \u202egnp.exe a\x08b \u2028 \x00"
UNCAUGHT = """
import threading
from megatron_webrl.util.text import configure_logging
configure_logging("test")
thread = threading.Thread(target=lambda: int("of a thread: canary-token"))
thread.start()
thread.join()
raise ValueError("of the program: canary-token")
"""


def test_messages_and_metric_names_have_the_form_that_their_readers_accept() -> None:
    for error, line in ((ValueError("one\ntwo"), "one"), (TimeoutError(), "TimeoutError")):
        assert first_line(error) == line
    for text, label in {
        "click-test": "click-test", "Food & Drink": "Food-Drink", "v1.5_x": "v1.5_x",
        "all(page, judge)": "all-page-judge", "Küche": "Küche", "..": "unnamed", "": "unnamed",
    }.items():  # fmt: skip
        assert metric_label(text) == label
        _validate_metric_name(f"success_rate/{label}")
    for limit, shown in (
        (6, "abcdef"), (5, "abc ... (1 character left out) ... ef"), (1, "a ... (5 characters left out) ... "),
    ):  # fmt: skip
        assert shorten_middle("abcdef", limit) == shown


def test_logs_messages_and_events_show_control_characters_and_do_not_send_them(tmp_path: Path) -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "the page %s failed", (f"shop {ACTIVE}",), None)
    EventLog(tmp_path).add("worker-0", "failed", f"title: {ACTIVE}")
    [event] = read_events(tmp_path)
    for text in (FORMATTER.format(record), event.reason, child_process.last_line(f"ERROR {ACTIVE}x")):
        assert text.isprintable(), ascii(text)
    assert "shop " in FORMATTER.format(record)


@given(st.text())
def test_printable_text_keeps_all_but_the_characters_that_act(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert not any((ord(each) < 32 and each not in "\t\n") or 127 <= ord(each) < 160 for each in shown)
    if text.isascii() and text.isprintable():
        assert shown == text


def test_a_refused_command_line_sends_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text('browser: {executable: "\\e]0;owned\\a"}\n')
    assert cli.main(["browsers", "serve", str(config)]) == 2
    assert "browser.executable=\\x1b]0;owned\\x07 is not an executable file" in capsys.readouterr().err


def test_values_of_secret_variables_are_removed_from_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SOME_API_KEY": "sk-canary/+=1", "HF_TOKEN": "hf_canary", "MLFLOW_TRACKING_PASSWORD": "canary password",
        "AWS_ACCESS_KEY_ID": "AKIACANARY", "AWS_SECRET_ACCESS_KEY": "/canary/secret",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
        assert redact(f"sent {value} twice: {value}.") == "sent *** twice: ***."
        escaped = value.replace("/", "\\/")  # as some encoders of JSON write it
        assert redact(f"before {escaped}").replace("\\", "") == "before ***"
        assert first_line(RuntimeError(f"refused {value}\nmore")) == "refused ***"


def test_users_and_passwords_of_addresses_are_removed_and_other_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:can%40ary-pass@proxy:3128")
    assert redact("through http://someone:can%40ary-pass@proxy:3128/") == "through http://***@proxy:3128/"
    assert redact("the password 'can@ary-pass' is wrong") == "the password '***' is wrong"
    assert redact("postgresql+psycopg2://u:p@db/mlflow") == "postgresql+psycopg2://***@db/mlflow"
    for name, value in {"SSL_KEY": sys.executable, "A_KEY": "none", "TOKENIZERS_PARALLELISM": "falsefalse"}.items():
        monkeypatch.setenv(name, value)  # a path, a short value, another variable: no secrets
    for text in (
        "https://medium.com/@someone", "someone@example.org", "sqlite:////a/b@c.db", "tokens 5, key 7",
        f"{sys.executable} none falsefalse",
    ):  # fmt: skip
        assert redact(text) == text


def test_a_record_and_an_exception_that_nothing_catches_are_logged_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare_secret("declared-canary")
    try:
        raise ValueError("in declared-canary")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "of %s", ("declared-canary",), sys.exc_info())
    line = FORMATTER.format(record)
    assert line.startswith("of ***\nTraceback")
    assert line.endswith("ValueError: in ***")
    monkeypatch.setenv("A_TOKEN", "canary-token")
    command = [sys.executable, "-c", UNCAUGHT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "test CRITICAL root: uncaught exception in Thread-1" in done.stderr
    assert "of a thread: ***" in done.stderr
    assert "ValueError: of the program: ***" in done.stderr
    assert "canary-token" not in done.stderr
