"""Sampler states and the log behind them, which the trainer publishes to the workers.

A state names the knowledge by which a range of tickets draws. It never changes; it applies from its first ticket to
that of the next one, and is published before the ticket limit rises above it: every claimed ticket has a state.

    sampler/index     JSON: the states; base and end of the log; its chunks [number, start, end], the base's first;
                      the trainer's task files
    sampler/<number>  JSON: the entries of a chunk; a number is used once in a job
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.tasks.sampler.knowledge import Entry, SamplerKnowledge, SamplerLog
from megatron_webrl.tasks.sampler.task_files import FileDigest, difference_between_nodes

CHUNK_ENTRIES = 4096  # at most, of one key; 64 bytes each or so

_INDEX = "sampler/index"


@dataclass(frozen=True)
class SamplerState:
    """The knowledge by which a range of tickets draws."""

    first_ticket: int  # the first ticket that it applies to
    learned: int  # prefix of the sampler log
    version: int  # of the policy when it was published


@dataclass(frozen=True)
class _Index:
    states: tuple[SamplerState, ...]  # oldest first
    base: int
    end: int
    chunks: tuple[tuple[int, int, int], ...]  # number, start, end; both are `base` where the entries are of the base
    files: Mapping[str, Any]  # task files of the trainer by setting

    @classmethod
    def read(cls, control: ControlClient) -> Self | None:
        fields: Any = control.get_json(_INDEX)
        if fields is None:
            return None
        states = tuple(SamplerState(*state) for state in fields["states"])
        return cls(states, fields["base"], fields["end"], tuple(map(tuple, fields["chunks"])), fields["files"])

    def update(self, log: SamplerLog | None, control: ControlClient) -> SamplerLog | None:
        """The log as published: `log` with what it lacks, or another one. None if a chunk was replaced meanwhile."""
        whole = log is None or log.end < self.base
        log = SamplerLog(self.base) if log is None or whole else log
        for number, start, end in self.chunks:
            if end <= log.end and not (whole and start == end == self.base):
                continue
            entries: Any = control.get_json(_key(number))
            if entries is None:
                return None
            if start == end:
                log.add_folded(Entry(*fields) for fields in entries)
                continue
            for entry in (Entry(*fields) for fields in entries):
                if entry.position >= log.end:
                    log.add(entry)
        log.end = max(log.end, self.end)
        return log


class SamplerPublisher:
    """Trainer: publishes what a log gains, and the states. Replaces what an earlier trainer of the job published."""

    def __init__(self, control: ControlClient, files: Mapping[str, FileDigest] | None = None) -> None:
        """`files`: the task files of the trainer by setting, with which workers compare theirs."""
        self._control, self._files = control, dict(files or {})
        index = _Index.read(control)
        self._chunks = list(index.chunks) if index else []
        self._next_number = 1 + max((number for number, _, _ in self._chunks), default=0)
        self._base, self._end = -1, -1  # of the log as this object published it

    def publish(self, log: SamplerLog, states: Sequence[SamplerState]) -> None:
        """Publish the states, oldest first, before the ticket limit rises above the first ticket of the last one."""
        replaced = []
        if log.base != self._base:
            replaced, self._chunks = self._chunks, []
            self._put(log.folded_entries(), log.base, log.base)
            self._put(log.entries, log.base, log.end)
        elif log.end != self._end:
            start = self._end
            _, last_start, last_end = self._chunks[-1] if self._chunks else (0, 0, 0)
            if last_start < last_end and log.end - last_start <= CHUNK_ENTRIES:
                replaced, start = [self._chunks.pop()], last_start  # a small chunk grows
            self._put([entry for entry in log.entries if entry.position >= start], start, log.end)
        self._base, self._end = log.base, log.end
        fields = {
            "states": [[state.first_ticket, state.learned, state.version] for state in states],
            "base": log.base,
            "end": log.end,
            "chunks": self._chunks,
            "files": self._files,
        }
        self._control.put_json(_INDEX, fields)
        for number, _, _ in replaced:
            self._control.put_json(_key(number), None)

    def _put(self, entries: Sequence[Entry], start: int, end: int) -> None:
        for first in range(0, len(entries), CHUNK_ENTRIES):
            part = entries[first : first + CHUNK_ENTRIES]
            self._control.put_json(_key(self._next_number), part)
            ends = (start, end) if start == end else (part[0].position, part[-1].position + 1)
            self._chunks.append((self._next_number, *ends))
            self._next_number += 1


def read_published(control: ControlClient) -> tuple[SamplerLog, tuple[SamplerState, ...]] | None:
    """Trainer: the log and the states that an earlier trainer of the job published; None without one."""
    index = _Index.read(control)
    log = index.update(None, control) if index else None
    return (log, index.states) if log is not None and index is not None else None


class SamplerStateReader:
    """A worker's copy of the published log, which reads each entry once."""

    def __init__(
        self,
        control: ControlClient,
        timeout_seconds: float,
        grace_seconds: float = 0.0,
        files: Mapping[str, FileDigest] | None = None,
        node: int = 0,
    ) -> None:
        """`timeout_seconds` limits the wait for a state, `grace_seconds` the silence of a trainer that restarts;
        `files`: the task files of the worker, on `node`, by setting.
        """
        self.control, self.timeout_seconds, self.grace_seconds = control, timeout_seconds, grace_seconds
        self._files, self._node = files or {}, node
        self._log: SamplerLog | None = None
        self._known: dict[SamplerState, SamplerKnowledge] = {}

    @classmethod
    def from_config(
        cls, config: Config, control: ControlClient, files: Mapping[str, FileDigest] | None = None, node: int = 0
    ) -> Self:
        return cls(control, config.run.startup_timeout_seconds, config.trainer_grace_seconds, files, node)

    async def knowledge(self, ticket: int) -> SamplerKnowledge:
        """The knowledge by which a claimed ticket draws, the same object for all tickets of a state.

        A ticket older than all states gets the oldest: it is closed, and the trainer drops its duplicates. Task files
        other than the trainer's end the job, because a restarted worker would have them, too. Raises JobFailed,
        JobEnded.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while (knowledge := self._find(ticket)) is None:
            self.control.check_job(("trainer-0",), self.grace_seconds)
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"{self.control.role} waited {self.timeout_seconds:.0f} s (run.startup_timeout_seconds) for the "
                    f"sampler state of ticket {ticket} from trainer-0"
                )
            await asyncio.sleep(POLL_SECONDS)
        return knowledge

    def _find(self, ticket: int) -> SamplerKnowledge | None:
        index = _Index.read(self.control)
        if index is None or not index.states:
            return None
        if difference := difference_between_nodes(index.files, self._files, self.control.role, self._node):
            self.control.end_job(f"failed: {difference}")
            raise JobFailed(difference)
        state = next((each for each in reversed(index.states) if each.first_ticket <= ticket), index.states[0])
        if state not in self._known:
            if self._log is not None and state.learned < self._log.base:
                self._log = None  # a restarted trainer published older states
            self._log = index.update(self._log, self.control)
            if self._log is None:
                return None
            self._known = {each: known for each, known in self._known.items() if each in index.states}
            self._known[state] = self._log.at(state.learned, state.version)
            self._log.fold(index.base)
        return self._known[state]


def _key(number: int) -> str:
    return f"sampler/{number}"
