"""Text of pages and servers for terminals and logs."""

from __future__ import annotations

import re

# C0 and C1 but for tab and newline, line separators, and what reverses or hides text: terminals act on them.
_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def printable(text: str) -> str:
    """The text with a backslash sequence such as \\x1b for each character that could control a terminal."""
    return _ACTIVE.sub(lambda match: ascii(match[0])[1:-1], text)
