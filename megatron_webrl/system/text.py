"""Text for messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` characters with "..." at the end."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def close_matches(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown name, such as "; near: click-test"; empty if no known name is close."""
    near = difflib.get_close_matches(name[:100], known, n=4, cutoff=0.4)
    return f"; near: {', '.join(near)}" if near else ""


def count_noun(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless there is one: "1 node", "2 nodes"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
