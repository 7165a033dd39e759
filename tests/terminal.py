"""A terminal of tests: a pseudo-terminal that a program writes to, and the screen that its output makes.

The screen knows what rich writes: text, line ends, and the sequences that move the cursor, erase, hide it, or colour.
"""

from __future__ import annotations

import os
import re
import struct
import termios
import threading
from contextlib import suppress
from fcntl import ioctl

_SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|\x1b\]8;.*?\x1b\\|[\r\n]|[^\x1b\r\n]+|\x1b")


class Screen:
    """All lines so far, those scrolled out included, and whether the cursor is visible."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.cursor_visible = columns, [""], True
        self.tallest = 0  # most lines from one to which the cursor moved up, to the last: the height of what is redrawn
        self._row = self._column = 0

    def write(self, output: str) -> None:
        """Raises AssertionError for a sequence that the screen does not know."""
        for match in _SEQUENCE.finditer(output):
            private, number, command = match[1], match[2], match[3]
            if command is None:
                self._text(match[0])
            elif private:
                assert (number, command) in (("25", "l"), ("25", "h")), match[0]
                self.cursor_visible = command == "h"
            elif command == "A":
                self._row -= int(number or 1)
                self.tallest = max(self.tallest, len(self.lines) - self._row)
            elif command == "K":
                assert number == "2", match[0]
                self.lines[self._row] = ""
            else:
                assert command == "m", match[0]

    def _text(self, text: str) -> None:
        if text == "\r":
            self._column = 0
        elif text == "\n":
            self._row += 1
            self.lines += [""] * (self._row + 1 - len(self.lines))
        else:
            assert text != "\x1b", "an escape character without a known sequence"
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
            self._column += len(text)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class Terminal:
    """A pseudo-terminal whose output is kept. Life cycle: made, `slave` given to a program, `finish` after its end."""

    def __init__(self, columns: int = 80, rows: int = 40) -> None:
        self._master, self.slave = os.openpty()
        ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.columns, self._data = columns, bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def become_controlling(self) -> None:
        """Make it the terminal of this process's session, so that Ctrl-C of the terminal reaches the process."""
        ioctl(self.slave, termios.TIOCSCTTY, 0)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    @property
    def output(self) -> str:
        return bytes(self._data).decode(errors="ignore")

    def finish(self) -> Screen:
        """The screen after the program's end."""
        os.close(self.slave)
        self._thread.join(10)
        os.close(self._master)
        screen = Screen(self.columns)
        screen.write(self.output)
        return screen

    def _read(self) -> None:
        with suppress(OSError):  # the last program has closed it
            while data := os.read(self._master, 65536):
                self._data += data
