"""Messages to the agent about one step."""

from __future__ import annotations

MAX_MESSAGE_CHARACTERS = 200
MAX_MESSAGES = 8


class StepMessages:
    """Short sentences without duplicates; messages beyond MAX_MESSAGES are only counted."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._omitted = 0

    def add(self, text: str) -> None:
        """Add a message; whitespace is collapsed, long text shortened."""
        text = shorten(text, MAX_MESSAGE_CHARACTERS)
        if text in self._counts or len(self._counts) < MAX_MESSAGES:
            self._counts[text] = self._counts.get(text, 0) + 1
        else:
            self._omitted += 1

    def clear(self) -> None:
        """Remove all messages."""
        self._counts.clear()
        self._omitted = 0

    def pop_text(self) -> str | None:
        """Remove all messages and return them in one line; None if there are none."""
        sentences = [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]
        text = "; ".join([*sentences, *([f"and {self._omitted} more"] if self._omitted else [])])
        self.clear()
        return text or None


def shorten(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters."""
    line = " ".join(text[: 10 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
