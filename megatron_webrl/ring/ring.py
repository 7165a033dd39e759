"""The ring of a node: records of variable length from several writer processes to several reader processes.

A writer reserves space under the allocation lock, copies the payload without a lock, and commits. Then readers see the
record by reference, any number of times, until one acknowledges it. Space is freed in the order of reservation.

Invariant: each change of the shared state takes effect by one 8-byte store with release order, after all its writes: to
`next` (reserving), a slot's state (committing, acknowledging) or `first` (freeing). A process killed before the store
changed nothing; one killed after it changed everything. A killed writer leaves at most reserved, uncommitted space. No
reader sees it, and it is freed like an acknowledged record once the writer is dead.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

from megatron_webrl.control.child_process import is_alive, start_time
from megatron_webrl.ring import segment as segments
from megatron_webrl.ring.segment import (
    FIRST_OFFSET,
    HOLDER_OFFSET,
    NEXT_OFFSET,
    SLOT_BYTES,
    SLOT_TABLE_OFFSET,
    AllocationLock,
    RecordCorrupt,
    RecordTooLarge,
    RingError,
    RingFull,
    Segment,
    checksum,
    poll_with_backoff,
)

LOCK_TIMEOUT_SECONDS = 10.0  # the lock is held for microseconds, except by a process that was stopped
ALIGNMENT = 64  # bytes; records begin on a cache line

# A slot's state word includes the sequence number. It is accessed atomically, and orders plain accesses to the rest.
STATE_OFFSET, DESCRIPTOR_OFFSET, CHECKSUM_OFFSET = 0, 8, 40
_DESCRIPTOR = struct.Struct("=4Q")  # start (a position that never wraps), length, writer's pid and start time
RESERVED, COMMITTED, RELEASED = 1, 2, 3


@dataclass(frozen=True)
class RingUsage:
    """Occupied space and records of a ring at one moment."""

    bytes_used: int  # not free for new records: records, and space skipped at the end of the data area
    bytes_capacity: int
    records: int  # committed and not acknowledged
    reserved: int  # reserved, not committed


class Ring(AbstractContextManager["Ring"]):
    """One attachment to a ring, safe for threads. A forked child must attach again."""

    def __init__(self, segment: Segment) -> None:
        self.name, self.job_id = segment.name, segment.job_id
        self._segment, self._words, self._layout = segment, segment.words, segment.layout
        self._lock = AllocationLock(segment.fd, segment.name)
        self._pid, self._pid_start = os.getpid(), start_time(os.getpid())
        table = np.frombuffer(segment.mapping, np.uint64, self._layout.slots * SLOT_BYTES // 8, SLOT_TABLE_OFFSET)
        self._states: np.ndarray | None = table.reshape(-1, SLOT_BYTES // 8)[:, STATE_OFFSET // 8]  # [slots]
        self._data = memoryview(segment.mapping)[self._layout.data_offset :]

    @classmethod
    def create_or_attach(cls, name: str, size_bytes: int, job_id: str, seconds: float = 10.0) -> Ring:
        """Attach the ring of this name and job; create it if missing, with `size_bytes` of data rounded up to pages.

        Raises RingError if it exists with another size or job, or if shared memory is too small.
        """
        return cls(segments.create_or_attach(name, size_bytes, job_id, seconds))

    @classmethod
    def attach(cls, name: str, seconds: float = 10.0, job_id: str | None = None) -> Ring:
        """Attach a ring, waiting up to `seconds`; a ring of another job than `job_id` is missing. Raises RingError."""
        return cls(segments.attach(name, seconds, job_id))

    @property
    def capacity(self) -> int:
        """Bytes of the largest record."""
        return self._layout.capacity

    def write(self, buffers: Sequence[bytes | bytearray | memoryview | np.ndarray], seconds: float) -> int:
        """Write one record, the concatenation of `buffers`; returns its sequence number.

        Waits up to `seconds` for space. A record of over half the capacity fits only while the ring is nearly empty.
        Raises RecordTooLarge, RingFull; readers see nothing then.
        """
        views = [_bytes_of(buffer, index) for index, buffer in enumerate(buffers)]
        length = sum(view.nbytes for view in views)
        sequence, offset = self._reserve(length, seconds)
        slot = self._slot(sequence)
        try:
            target, position = self._data[offset : offset + length], 0
            for view in views:
                target[position : position + view.nbytes] = view
                position += view.nbytes
            self._words.store(slot + CHECKSUM_OFFSET, checksum(target))
        except BaseException:
            self._words.store(slot, _word(sequence, RELEASED))
            raise
        self._words.store(slot, _word(sequence, COMMITTED))
        return sequence

    def committed(self, seen: Container[int] = ()) -> list[int]:
        """Ascending numbers of records committed, not acknowledged, not in `seen`. Lower ones may appear later."""
        first, following = self._words.load(FIRST_OFFSET), self._words.load(NEXT_OFFSET)
        numbers = np.arange(first, following, dtype=np.uint64)
        states = self._state_words()[numbers % np.uint64(self._layout.slots)]
        candidates = numbers[states == numbers * np.uint64(4) + np.uint64(COMMITTED)].tolist()
        # The scan uses plain loads; the acquiring load orders the payload after the state.
        return [n for n in candidates if n not in seen and self._words.load(self._slot(n)) == _word(n, COMMITTED)]

    def wait(self, seen: Container[int], seconds: float) -> list[int]:
        """Like `committed`, but wait up to `seconds` for at least one record; empty after that time."""
        for _ in poll_with_backoff(seconds):
            if found := self.committed(seen):
                return found
        return []

    def read(self, sequence: int, verify: bool = True) -> memoryview:
        """The record, by reference and read-only. Its content is valid until it is acknowledged.

        Raises RingError if it is not committed, RecordCorrupt if `verify` is set and the checksum does not match.
        """
        slot = self._slot(sequence)
        if self._words.load(slot) != _word(sequence, COMMITTED):
            raise RingError(f"ring {self.name}: record {sequence} is {self._describe(sequence)}, not there to read")
        start, length, writer, _ = self._descriptor(slot)
        offset = start % self._layout.capacity
        if offset + length > self._layout.capacity:
            raise RecordCorrupt(
                f"ring {self.name}: record {sequence} claims {length} bytes at {offset} of {self._layout.capacity}; "
                "its slot was overwritten; acknowledge it to drop it"
            )
        record = self._data[offset : offset + length].toreadonly()
        if verify and (found := checksum(record)) != (expected := self._words.load(slot + CHECKSUM_OFFSET)):
            raise RecordCorrupt(
                f"ring {self.name}: record {sequence} of {length} bytes has checksum {found:016x}, its writer "
                f"(process {writer}) committed {expected:016x}; acknowledge it to drop it"
            )
        return record

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records, in any order; views of them are invalid afterwards.

        May be repeated, as after a crash. Raises RingError, before any record is freed, if one was never committed.
        """
        numbers = list(sequences)
        with self._locked():
            first, following = self._words.load(FIRST_OFFSET), self._words.load(NEXT_OFFSET)
            for number in numbers:
                if number >= following or (number >= first and self._state(number) == RESERVED):
                    raise RingError(
                        f"ring {self.name}: record {number} is {self._describe(number)} and cannot be acknowledged"
                    )
            for number in numbers:
                if number >= first:
                    self._words.store(self._slot(number), _word(number, RELEASED))
            self._free()

    def usage(self) -> RingUsage:
        """The ring's usage, after freeing the space of dead writers where possible."""
        with self._locked():
            first, following = self._free()
            states = [self._state(number) for number in range(first, following)]
            tail, head = self._span(first, following)
        return RingUsage(head - tail, self._layout.capacity, states.count(COMMITTED), states.count(RESERVED))

    def close(self) -> None:
        """Detach; a second call does nothing. Views from `read` stay mapped, but their content may change."""
        if self._states is None:
            return
        self._states = None
        self._data.release()
        segments.detach(self._segment)

    def unlink(self) -> None:
        """Remove the ring's name; call this before `close`. Attached processes keep the memory."""
        segments.unlink(self._segment)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _reserve(self, length: int, seconds: float) -> tuple[int, int]:
        """Reserve `length` bytes; the sequence number and the offset in the data area."""
        if length > self._layout.capacity:
            raise RecordTooLarge(
                f"a record of {length} bytes does not fit ring {self.name} of {self._layout.capacity} bytes; raise "
                "ring.capacity_mib, or make episodes shorter or screenshots smaller"
            )
        for _ in poll_with_backoff(seconds):
            with self._locked():
                first, following = self._free()
                start = self._place(length, first, following)
                if start is not None:
                    self._claim(following, start, length)
                    return following, start % self._layout.capacity
        usage = self.usage()
        raise RingFull(
            f"ring {self.name} had no room for {length} bytes within {seconds:g} s: {usage.bytes_used} of "
            f"{usage.bytes_capacity} bytes and {usage.records + usage.reserved} of {self._layout.slots} slots are used "
            f"by {usage.records} unacknowledged records and {usage.reserved} being written, the oldest of them record "
            f"{self._words.load(FIRST_OFFSET)}; is the trainer alive? Otherwise raise ring.capacity_mib"
        )

    def _place(self, length: int, first: int, following: int) -> int | None:
        """The start of the next record, as a position that never wraps; None if there is no space."""
        if following - first >= self._layout.slots:
            return None
        capacity = self._layout.capacity
        tail, head = self._span(first, following)
        # An empty ring starts over at the beginning of the data area, which is likely to be in the CPU caches.
        if first == following or head % capacity + length > capacity:
            head = -(-head // capacity) * capacity
        return head if first == following or head + length - tail <= capacity else None

    def _claim(self, sequence: int, start: int, length: int) -> None:
        at = self._slot(sequence)
        _DESCRIPTOR.pack_into(self._segment.mapping, at + DESCRIPTOR_OFFSET, start, length, self._pid, self._pid_start)
        self._words.store(at, _word(sequence, RESERVED))
        self._words.store(NEXT_OFFSET, sequence + 1)

    def _free(self) -> tuple[int, int]:
        """Advance `first` over released records and over those of dead writers; returns `first` and `next`."""
        first, following = self._words.load(FIRST_OFFSET), self._words.load(NEXT_OFFSET)
        position = first
        while position < following:
            state = self._state(position)
            if state == COMMITTED:
                break
            if state == RESERVED and is_alive(*self._descriptor(self._slot(position))[2:]):
                break
            position += 1
        if position != first:
            self._words.store(FIRST_OFFSET, position)
        return position, following

    def _span(self, first: int, following: int) -> tuple[int, int]:
        """Start of the oldest record and end of the newest one, as positions that never wrap."""
        if following == 0:
            return 0, 0
        start, length, _, _ = self._descriptor(self._slot(following - 1))
        head = -(-(start + length) // ALIGNMENT) * ALIGNMENT
        return (self._descriptor(self._slot(first))[0] if first < following else head), head

    def _state(self, sequence: int) -> int:
        """RESERVED, COMMITTED or RELEASED, for a sequence number in [first, next)."""
        word = self._words.load(self._slot(sequence))
        if word // 4 != sequence or word % 4 == 0:
            raise RingError(f"ring {self.name}: slot of record {sequence} holds {word:#x}; the segment was overwritten")
        return word % 4

    def _describe(self, sequence: int) -> str:
        if sequence >= self._words.load(NEXT_OFFSET):
            return "not written yet"
        word = self._words.load(self._slot(sequence))
        return "being written" if word == _word(sequence, RESERVED) else "acknowledged or discarded by its writer"

    def _descriptor(self, slot: int) -> tuple[int, int, int, int]:
        return _DESCRIPTOR.unpack_from(self._segment.mapping, slot + DESCRIPTOR_OFFSET)

    def _slot(self, sequence: int) -> int:
        return SLOT_TABLE_OFFSET + sequence % self._layout.slots * SLOT_BYTES

    def _state_words(self) -> np.ndarray:
        if self._states is None:
            raise RingError(f"ring {self.name} is closed; attach again")
        return self._states

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._state_words()  # after close, the file descriptor of the lock may belong to another file
        with self._lock.acquire(LOCK_TIMEOUT_SECONDS, lambda: self._words.load(HOLDER_OFFSET)):
            self._words.store(HOLDER_OFFSET, self._pid)
            yield


def _word(sequence: int, state: int) -> int:
    return sequence * 4 + state


def _bytes_of(buffer: bytes | bytearray | memoryview | np.ndarray, index: int) -> memoryview:
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.c_contiguous:
        raise RingError(f"buffer {index} of the record is not contiguous; give numpy.ascontiguousarray of it")
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(frozen=True)
class NodeRing:
    """The ring of one node: workers create it and write, trainer ranks read. `job_id` tells jobs of one name apart."""

    node: int
    name: str  # of the segment
    job_id: str  # the same on all nodes of the job

    def create_or_attach(self, size_bytes: int) -> Ring:
        """For writers. Raises RingError, also if processes of an earlier job still use the name."""
        return Ring.create_or_attach(self.name, size_bytes, self.job_id)

    def attach(self, seconds: float) -> Ring:
        """For readers: wait until this job's ring exists. Raises RingError."""
        return Ring.attach(self.name, seconds, self.job_id)
