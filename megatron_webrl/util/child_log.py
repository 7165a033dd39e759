"""Copies the output of one life of a child process to a log file of limited size, and keeps its last lines.

The child and its own children write to a pipe, which a thread of the parent reads, so that a rotation loses no line. An
error of the file system costs lines, which are counted, and never blocks the child; a parent that is stopped blocks it
after PIPE_BYTES of output.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from megatron_webrl.util.text import printable

MAX_LOG_BYTES = 64 * 2**20  # a file that has reached this is renamed to <name>.1
KEPT_LOGS = 3  # <name>.1 to <name>.3
PIPE_BYTES = 2**20
TAIL_BYTES = 32 * 2**10  # of the output, kept for messages


def last_line(text: str) -> str:
    """The last line with ERROR of an output, else its last line that is not empty; "none" without one."""
    lines = [line.strip() for line in text.splitlines()[-200:] if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return printable((errors or lines or ["none"])[-1][:500])


class ChildLog:
    """Life cycle: made, `write_fd` given to the child, `start`; it ends with the last process that can write to it."""

    def __init__(self, path: Path) -> None:
        """`path`: a file, or what can be opened as one, such as this process's own output."""
        self.path, self._file = path, -1  # opened by the first write
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        with suppress(PermissionError):  # beyond the user's limit of pipe memory
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._lock = threading.Lock()
        self._tail, self._lost, self._open = b"", 0, True
        self._write(b"")

    def start(self, name: str) -> None:
        """Copy from now on; the parent's end of the pipe is closed."""
        os.close(self.write_fd)
        threading.Thread(target=self._run, name=f"log of {name}", daemon=True).start()

    def add(self, line: str) -> None:
        """Add a line of the parent's own."""
        with self._lock:
            self._write(f"{line}\n".encode())

    def last_line(self) -> str:
        """The last line that this life has written (see the function)."""
        self.drain()
        with self._lock:
            return last_line(self._tail.decode(errors="replace"))

    def drain(self) -> None:
        """Copy what the child has written so far."""
        with self._lock:
            copied = 0
            while copied < PIPE_BYTES and (count := self._copy()):
                copied += count

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._read_fd, select.POLLIN)
        while self._open:
            ready.poll()
            with self._lock:
                self._copy()

    def _copy(self) -> int:
        """Copy one chunk; returns its size, 0 if there is none. Closes everything once nobody can write any more."""
        if not self._open:
            return 0
        try:
            chunk = os.read(self._read_fd, 2**16)
        except BlockingIOError:
            return 0
        if chunk:
            self._write(chunk)
        else:
            self._open = False
            os.close(self._read_fd)
            if self._file >= 0:
                os.close(self._file)
        return len(chunk)

    def _write(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if not self._open:
            return
        try:
            if self._file < 0:
                self._reopen()
            line, newline, rest = chunk.partition(b"\n")
            if os.fstat(self._file).st_size >= (MAX_LOG_BYTES if newline else 2 * MAX_LOG_BYTES):  # lines stay whole
                self._append(line + newline)
                names = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, KEPT_LOGS + 1))]
                for newer, older in reversed(list(pairwise(names))):
                    if newer.exists():
                        newer.replace(older)
                self._reopen()
                chunk = rest
            if self._lost:
                self._append(f"ERROR {self._lost} bytes of output were lost: the log was not writable\n".encode())
                self._lost = 0
            self._append(chunk)
        except OSError:  # such as a full disk
            self._lost += len(chunk)

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    def _reopen(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if self._file >= 0:
            os.close(self._file)
        self._file = file
