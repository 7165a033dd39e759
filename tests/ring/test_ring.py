"""Writing, reading and acknowledging records of one ring."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from megatron_webrl.ring.ring import Ring, RingUsage
from megatron_webrl.ring.segment import RecordCorrupt, RecordTooLarge, RingError, RingFull, sweep_segments
from tests.ring.support import CAPACITY, PREFIX, RUN, check, damage, payload
from tests.waiting import exit_code, fork


def test_reading_does_not_consume_and_acknowledging_does(ring: Ring) -> None:
    first, second = ring.write([b"a"], 1), ring.write([b"b"], 1)
    assert ring.committed() == ring.committed() == [first, second]
    assert ring.committed(seen={first}) == [second]
    ring.acknowledge([first])
    assert ring.committed() == [second]
    for use, words in (
        (lambda: ring.read(first), r"record 0 is acknowledged.*not there to read"),
        (lambda: ring.read(7), "record 7 is not written yet"),
        (lambda: ring.acknowledge([second, 7]), "record 7 is not written yet and cannot be acknowledged"),
    ):
        with pytest.raises(RingError, match=words):
            use()
    assert ring.committed() == [second]
    ring.acknowledge([first, second])
    assert ring.usage() == RingUsage(0, CAPACITY, 0, 0)


def test_records_wrap_around_contiguously_for_many_rounds(ring: Ring) -> None:
    random, unacknowledged = np.random.default_rng(0), []
    for number in range(500):
        unacknowledged.append(ring.write([payload(number, int(random.integers(24, 7000)))], 1))
        while len(unacknowledged) > random.integers(1, 5):
            sequence = unacknowledged.pop(int(random.integers(2)) % len(unacknowledged))
            assert check(ring.read(sequence)) == sequence
            ring.acknowledge([sequence])
    assert sorted(unacknowledged) == ring.committed()
    assert all(check(ring.read(sequence)) == sequence for sequence in unacknowledged)


def test_records_fill_the_data_area_to_its_last_byte(ring: Ring) -> None:
    for _ in range(4):
        ring.write([bytes(CAPACITY // 4)], 0.1)
    assert ring.usage() == RingUsage(CAPACITY, CAPACITY, 4, 0)


def test_a_full_ring_blocks_the_writer_until_another_process_acknowledges(ring: Ring, name: str) -> None:
    sequences = [ring.write([payload(number, 20_000)], 1) for number in range(3)]
    begun = time.monotonic()
    with pytest.raises(RingFull, match=r"no room for 20000 bytes within 0.2 s: 60096 of 65536 .* 3 unacknowledged"):
        ring.write([payload(3, 20_000)], 0.2)
    assert 0.2 <= time.monotonic() - begun < 10
    assert [check(ring.read(sequence)) for sequence in sequences] == [0, 1, 2]

    def read() -> None:
        with Ring.attach(name) as mine:
            assert check(mine.read(sequences[0])) == 0
            mine.acknowledge(sequences[:1])

    pid = fork(read)
    assert check(ring.read(ring.write([payload(3, 20_000)], 10))) == 3
    assert exit_code(pid) == 0


def test_a_full_slot_table_blocks_the_writer(ring: Ring) -> None:
    sequences = [ring.write([b"x"], 1) for _ in range(64)]
    with pytest.raises(RingFull, match="64 of 64 slots"):
        ring.write([b"x"], 0.05)
    ring.acknowledge(sequences[:1])
    assert ring.write([b"x"], 1) == 64
    ring.acknowledge(sequences[:1])  # once more, as after a crash; the new record has its slot
    assert ring.committed()[-1] == 64


def test_a_record_of_the_whole_capacity_fits_and_a_larger_one_is_refused(ring: Ring) -> None:
    ring.acknowledge([ring.write([bytes(100)], 1)])
    sequence = ring.write([payload(1, CAPACITY)], 1)
    assert check(ring.read(sequence)) == 1
    with pytest.raises(RecordTooLarge, match=r"65537 bytes does not fit ring .* of 65536 bytes"):
        ring.write([bytes(CAPACITY + 1)], 1)


def test_one_corrupt_byte_is_detected_at_any_position(ring: Ring) -> None:
    for number, position in enumerate((0, 4095, 4096, 9999)):
        sequence = ring.write([np.random.default_rng(0).bytes(10_000)], 1)
        damage(ring, sequence, position)
        with pytest.raises(RecordCorrupt, match=rf"record {number} of 10000 bytes has checksum .*acknowledge it"):
            ring.read(sequence)
        assert len(ring.read(sequence, verify=False)) == 10_000
        ring.acknowledge([sequence])
    assert ring.usage().bytes_used == 0


def test_a_failed_write_is_not_visible_and_its_space_is_freed(ring: Ring) -> None:
    with pytest.raises(RingError, match="buffer 1 of the record is not contiguous"):
        ring.write([b"a", np.zeros((4, 4))[:, 1]], 1)
    whole = ring._data
    ring._data = whole.toreadonly()  # the copy into the ring fails
    with pytest.raises(TypeError):
        ring.write([bytes(1000)], 1)
    ring._data = whole
    assert ring.committed() == []
    assert ring.usage() == RingUsage(0, CAPACITY, 0, 0)


def test_threads_may_share_one_attachment(ring: Ring) -> None:
    def write(start: int) -> None:
        for number in range(start, start + 50):
            ring.write([payload(number, 2000)], 10)

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 50, 100)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < 150:
        sequences = ring.wait((), 10)
        assert sequences
        found += [check(ring.read(sequence)) for sequence in sequences]
        ring.acknowledge(sequences)
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(150))


def test_views_outlive_a_closed_ring_and_a_closed_ring_refuses_everything(name: str) -> None:
    ring = Ring.create_or_attach(name, 4096, RUN)
    sequence = ring.write([b"still here"], 1)
    view = np.frombuffer(ring.read(sequence), np.uint8)
    ring.close()
    ring.close()
    gc.collect()
    assert view.tobytes() == b"still here"
    assert sweep_segments(name) == [name]
    for use in (
        ring.committed, ring.usage, lambda: ring.read(0), lambda: ring.acknowledge([0]),
        lambda: ring.write([b"x"], 1),
    ):  # fmt: skip
        with pytest.raises(RingError, match="closed"):
            use()


def test_a_fork_must_attach_again_and_its_close_leaves_the_parent_attached(ring: Ring) -> None:
    def use() -> None:
        with pytest.raises(RingError, match="attach in the process that uses it"):
            ring.write([b"x"], 1)
        ring.close()

    assert exit_code(fork(use)) == 0
    assert sweep_segments(PREFIX) == []
    assert ring.write([b"x"], 1) == 0
