"""Writers and readers killed at any point, restarts, several processes at once."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import pytest

from megatron_webrl.control.child_process import start_time
from megatron_webrl.ring.ring import HOLDER_OFFSET, Ring, RingUsage
from megatron_webrl.ring.segment import RingError
from tests.ring.support import CAPACITY, RUN, check, kill, killed_at_line, payload
from tests.waiting import exit_code, fork, run_apart, until


def kill_writer(name: str) -> None:
    line, visible, died = 0, [], True
    with Ring.create_or_attach(name, CAPACITY, RUN) as ring:
        while died:
            line += 1
            died = killed_at_line(line, lambda: Ring.attach(name), lambda r: r.write([payload(line, 20_000)], 1))  # noqa: B023
            found = ring.committed()
            assert [check(ring.read(sequence)) for sequence in found] == [line] * len(found)
            ring.acknowledge(found)
            assert ring.usage() == RingUsage(0, CAPACITY, 0, 0)
            visible.append(len(found))
    assert line > 60
    assert visible == sorted(visible)  # from nothing to the whole record at one line
    assert (visible[0], visible[-1]) == (0, 1)


def test_a_writer_killed_before_any_line_leaves_the_complete_record_or_nothing(name: str) -> None:
    run_apart(kill_writer, name)


def kill_reader(name: str) -> None:
    line, died = 0, True
    with Ring.create_or_attach(name, CAPACITY, RUN) as ring:
        while died:
            line += 1
            sequences = [ring.write([payload(number, 15_000)], 1) for number in range(4)]
            died = killed_at_line(line, lambda: Ring.attach(name), lambda r: r.acknowledge(sequences[1:3]))  # noqa: B023
            left = ring.committed()
            assert [check(ring.read(sequence)) for sequence in left] == [sequence - sequences[0] for sequence in left]
            assert {sequences[0], sequences[3]} <= set(left)
            ring.acknowledge(sequences)
            assert ring.usage() == RingUsage(0, CAPACITY, 0, 0)
    assert line > 40


def test_a_reader_killed_before_any_line_of_acknowledging_leaves_each_record_complete_or_freed(name: str) -> None:
    run_apart(kill_reader, name)


def test_space_that_a_writer_has_reserved_is_its_own_until_it_is_killed(ring: Ring, name: str) -> None:
    def reserve() -> None:
        Ring.attach(name)._reserve(60_000, 1)
        signal.pause()

    pid = fork(reserve)
    until(lambda: ring.usage().reserved, "the reservation")
    assert ring.usage() == RingUsage(60_032, CAPACITY, 0, 1)
    assert ring.committed() == []
    for use, words in (
        (lambda: ring.read(0), "record 0 is being written"),
        (lambda: ring.acknowledge([0]), "record 0 is being written and cannot be acknowledged"),
        (lambda: ring.write([bytes(60_000)], 0.2), "0 unacknowledged records and 1 being written"),
    ):
        with pytest.raises(RingError, match=words):
            use()
    os.kill(pid, signal.SIGKILL)  # not waited for: a zombie counts as dead
    assert check(ring.read(ring.write([payload(3, 60_000)], 10))) == 3
    assert exit_code(pid) == -signal.SIGKILL


def test_the_space_of_a_dead_writer_is_freed_although_its_number_belongs_to_another_process(
    ring: Ring, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_webrl.ring.ring.start_time", lambda pid: start_time(pid) - 1)
    with Ring.attach(name) as earlier:
        earlier._reserve(60_000, 1)
    assert ring.usage() == RingUsage(0, CAPACITY, 0, 0)


def test_a_stopped_process_with_the_lock_is_named_after_the_limit(ring: Ring, name: str, monkeypatch) -> None:
    def hold() -> None:
        with Ring.attach(name)._locked():
            signal.pause()

    pid = fork(hold)
    until(lambda: ring._words.load(HOLDER_OFFSET) == pid, "the lock of the other process")
    monkeypatch.setattr("megatron_webrl.ring.ring.LOCK_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(RingError, match=rf"lock was not free within 0.2 s; process {pid} took it last"):
        ring.write([b"x"], 1)
    kill(pid)
    assert ring.write([b"x"], 1) == 0


def test_several_writers_and_readers_transfer_every_record_once_and_intact(ring: Ring, name: str, tmp_path) -> None:
    writers, readers, each = 3, 2, 150

    def write(writer: int) -> None:
        random = np.random.default_rng(writer)
        with Ring.attach(name) as mine:
            for number in range(writer * each, (writer + 1) * each):
                mine.write([payload(number, int(random.integers(24, 40_000)))], 30)

    def read(reader: int) -> None:
        seen: set[int] = set()
        numbers: list[int] = []
        with Ring.attach(name) as mine:
            while len(numbers) < writers * each * (reader + 1) // readers - writers * each * reader // readers:
                fresh = mine.wait(seen, 30)
                assert fresh
                seen.update(fresh)
                own = [sequence for sequence in fresh if sequence % readers == reader]
                numbers += [check(mine.read(sequence)) for sequence in own]
                mine.acknowledge(own)
        (tmp_path / str(reader)).write_text(" ".join(map(str, numbers)))

    pids = [fork(partial(read, r)) for r in range(readers)] + [fork(partial(write, w)) for w in range(writers)]
    assert [exit_code(pid, 60) for pid in pids] == [0] * len(pids)
    numbers = [int(n) for reader in range(readers) for n in (tmp_path / str(reader)).read_text().split()]
    assert sorted(numbers) == list(range(writers * each))
    assert ring.usage() == RingUsage(0, CAPACITY, 0, 0)
