"""Syntax of key chords such as "Control+a"."""

from __future__ import annotations

import re

_MODIFIERS = ("Control", "Shift", "Alt", "Meta")
_NAMED = (
    "Enter", "Tab", "Escape", "Backspace", "Delete", "Insert", "Space", "Home", "End", "PageUp", "PageDown",
    "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", *(f"F{number}" for number in range(1, 13)),
)  # fmt: skip
_CHORD = re.compile(rf"((?:(?:{'|'.join(_MODIFIERS)})\+)*)(?:{'|'.join(_NAMED)}|[!-~])")


def is_key_chord(text: str) -> bool:
    """Whether `text` is modifiers, each once, and one key, joined by "+": "Enter", "Control+a", "Control+Shift++"."""
    match = _CHORD.fullmatch(text)
    if match is None:
        return False
    modifiers = match[1].split("+")[:-1]
    return len(set(modifiers)) == len(modifiers)
