"""Text for messages."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` characters with "..." at the end."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
