"""What happened during a step that the agent should know."""

from __future__ import annotations

MAX_MESSAGE_CHARACTERS = 200  # characters
MAX_MESSAGES = 8


class StepMessages:
    """Short sentences, each once however often it is said; a page that says a lot is cut off."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._left_out = 0

    def add(self, text: str) -> None:
        """Say something; whitespace is made single, long text shortened."""
        text = shorten(text, MAX_MESSAGE_CHARACTERS)
        if text in self._said or len(self._said) < MAX_MESSAGES:
            self._said[text] = self._said.get(text, 0) + 1
        else:
            self._left_out += 1

    def clear(self) -> None:
        """Forget everything."""
        self._said.clear()
        self._left_out = 0

    def pop_text(self) -> str | None:
        """All of it in one line, and forget it; None if nothing was said."""
        said = [text if count == 1 else f"{text} ({count} times)" for text, count in self._said.items()]
        text = "; ".join([*said, *([f"and {self._left_out} more"] if self._left_out else [])])
        self.clear()
        return text or None


def shorten(text: str, limit: int) -> str:
    """`text` on one line and of at most `limit` characters."""
    line = " ".join(text[: 10 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
