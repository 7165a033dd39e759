"""The journal of the control service: each request that changes the state of the job, appended before its reply.

A service that is killed and started again reads it and continues. The first line may be a snapshot, which replaces a
journal that has become long. A last line without its end was never answered: its sender sends the request again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

from megatron_webrl.control.state import JobState
from megatron_webrl.util import atomic_file

log = logging.getLogger(__name__)

DAMAGED_EXIT_CODE = 65  # of a service whose journal cannot be read: another start would read the same
COMPACT_BYTES = 16 * 2**20  # appended since the last snapshot


class JournalError(RuntimeError):
    """A journal that cannot be read. The message names the line."""


def restore(path: Path) -> JobState:
    """The state that a journal describes; cuts off an incomplete last line. Raises JournalError, OSError."""
    state, complete = JobState(), 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                log.warning("%s: the last of %d lines is incomplete, and was never answered", path, number)
                file.truncate(complete)
                break
            complete += len(line)
            try:
                entry = json.loads(line)
                if isinstance(entry, str):
                    state = pickle.loads(base64.b64decode(entry))
                else:
                    state.apply(*entry)
            except (ValueError, TypeError, pickle.UnpicklingError) as error:
                raise JournalError(f"{path}, line {number}: {error}") from error
    state.changed.clear()
    return state


class Journal:
    """An open journal. Belongs to one event loop.

    After a failed write the file is removed: the service continues, but a restart of it would end the job.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OSError."""
        self.path = path
        self.error: str | None = None  # of the failed write
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        atomic_file.fsync(path.parent)
        self._appended = self._synced = 0  # requests
        self._compact_at = os.fstat(self._file).st_size + COMPACT_BYTES  # size of the file
        self._syncing = asyncio.Lock()

    def append(self, stream: str, number: int, commands: Any, state: JobState) -> None:
        """Write a request that `state` has run: it survives SIGKILL; after `sync` the failure of the machine, too."""
        if self.error is not None:
            return
        line = json.dumps([stream, number, commands]).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
            self._appended += 1
            if os.fstat(self._file).st_size > self._compact_at:
                self._compact(state)
        except OSError as error:
            self._give_up(error)

    async def sync(self) -> None:
        """Wait until everything appended so far is on disk. Concurrent calls share a sync."""
        target = self._appended
        async with self._syncing:
            if self.error is not None or self._synced >= target:
                return
            upto = self._appended
            try:
                await asyncio.to_thread(os.fdatasync, self._file)
                self._synced = max(self._synced, upto)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        os.close(self._file)

    def _compact(self, state: JobState) -> None:
        atomic_file.write_json(self.path, base64.b64encode(pickle.dumps(state)).decode(), mode=0o600)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, self._file)  # a sync in progress keeps the descriptor's number
        os.close(file)
        self._synced = self._appended
        self._compact_at = os.fstat(self._file).st_size + COMPACT_BYTES

    def _give_up(self, error: OSError) -> None:
        self.error = f"{self.path}: {error.strerror}"
        log.error("%s; the job continues, but ends if the control service does", self.error)
        self.path.unlink(missing_ok=True)
