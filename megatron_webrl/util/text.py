"""Text for messages and logs, without secrets and without characters that control a terminal.

Secret are the values of environment variables with a name such as OPENAI_API_KEY, HF_TOKEN or MLFLOW_TRACKING_PASSWORD,
values that a part of the program declares, and the user and password of any address.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

HIDDEN = "***"
MIN_SECRET_CHARS = 8  # shorter values are placeholders, and would replace parts of words
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_ID)?$", re.IGNORECASE)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"<>]+(?=@)")
_declared: set[str] = set()
# C0 and C1 but for tab and newline, line separators, and what reverses or hides text: terminals act on them.
_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message without secrets, or the name of its class if it has none."""
    return redact((str(error).splitlines() or [type(error).__name__])[0])


def shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` characters with "..." at the end."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shorten_middle(text: str, limit: int) -> str:
    """The text, cut to its first and last characters, `limit` together, with the number of missing ones in between."""
    missing = len(text) - limit
    if missing <= 0:
        return text
    head = limit - limit // 2
    return f"{text[:head]} ... ({count_noun(missing, 'character')} left out) ... {text[head + missing :]}"


def encodable(text: str) -> str:
    """The text with "?" for each lone surrogate, which JSON can express but no encoding can."""
    return text.encode("utf-8", "replace").decode()


def metric_label(text: str) -> str:
    """The text as one part of a metric name: what is no letter, digit, underscore or dot becomes "-"; never empty."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.") or "unnamed"


def close_matches(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown name, such as "; near: click-test"; empty if no known name is close."""
    near = difflib.get_close_matches(name[:100], known, n=4, cutoff=0.4)
    return f"; near: {', '.join(near)}" if near else ""


def count_noun(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless there is one: "1 node", "2 nodes"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """The text with a backslash sequence such as \\x1b for each character that could control a terminal."""
    return _ACTIVE.sub(lambda match: ascii(match[0])[1:-1], text)


def declare_secret(value: str) -> None:
    """Hide a value from here on, in this process."""
    if len(value) >= MIN_SECRET_CHARS:
        _declared.add(value)


@lru_cache(maxsize=4)
def _secret_values(environment: tuple[tuple[str, str], ...], declared: frozenset[str]) -> list[str]:
    """Values of the variables whose names say that they are secret, but for paths; passwords of addresses in any.

    Longest first. They are remembered: every line of a log asks for them, and a path may be on a stalled file system.
    """
    found = set(declared)
    for name, value in environment:
        if _SECRET_NAME.search(name) and not Path(value).exists():
            found.add(value.strip())
        for user in _USER_OF_ADDRESS.findall(value) if "@" in value else ():
            password = user.partition(":")[2]
            found |= {password, unquote(password)}
    return sorted((value for value in found if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True)


def redact(text: str) -> str:
    """The text with "***" for each secret, also where JSON has escaped some of its characters by a backslash."""
    for value in _secret_values(tuple(os.environ.items()), frozenset(_declared)):
        text = text.replace(value, HIDDEN)
        if "\\" in text:
            text = re.sub(r"\\*".join(map(re.escape, value)), HIDDEN, text)
    return _USER_OF_ADDRESS.sub(HIDDEN, text) if "@" in text else text


def has_address_with_user(text: str) -> bool:
    """Whether the text holds an address with a user or a password."""
    return bool(_USER_OF_ADDRESS.search(text))


class RedactingFormatter(logging.Formatter):
    """Formats records, their tracebacks included, without secrets and without control characters of pages."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)))


def configure_logging(role: str, level: int = logging.INFO) -> None:
    """Log to standard error without secrets; exceptions that nothing catches go there, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda uncaught: _log_uncaught(
        uncaught.exc_type, uncaught.exc_value, uncaught.exc_traceback, uncaught.thread
    )


def _log_uncaught(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    thread: threading.Thread | None = None,
) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif error is not None and not isinstance(error, SystemExit):
        logging.critical("uncaught exception%s", f" in {thread.name}" if thread else "", exc_info=(kind, error, trace))
