"""Text for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from megatron_webrl.util.redaction import redact


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
