"""Throughput of the shared-memory ring, compared with memcpy and a multiprocessing queue.

One writer process, one reader process, one record size at a time; the median of several rounds. `memcpy` is one process
that copies the same bytes to successive offsets of shared memory of the ring's size: the upper limit.

    python -m tools.bench.ring [--quick] [--json FILE]
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable

import numpy as np

from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import checksum, segment_name, sweep_segments
from tools.arguments import make_bench_parser, write_json

SIZES = {"100 kB": 100_000, "3 MB": 3_000_000}
CAPACITY = 256 * 2**20  # bytes
SECONDS = 120.0  # limit of any wait
FORK_CONTEXT = multiprocessing.get_context("fork")
QUEUE_DIVISOR = 20  # the slow queue gets 1/20 of the data


def memcpy(source: bytes, total: int) -> float:
    """GB/s of copying `source` to successive offsets of shared memory."""
    with mmap.mmap(-1, CAPACITY) as shared, memoryview(shared) as target:
        offsets = range(0, CAPACITY - len(source), -(-len(source) // 64) * 64)
        for offset in offsets:  # allocate the pages, as the ring does when it is created
            target[offset : offset + len(source)] = source
        rounds = max(1, total // (len(offsets) * len(source)))
        begun = time.perf_counter()
        for _ in range(rounds):
            for offset in offsets:
                target[offset : offset + len(source)] = source
        return rounds * len(offsets) * len(source) / (time.perf_counter() - begun) / 1e9


def throughput(work: Callable[[bytes], object], source: bytes, total: int) -> float:
    """GB/s of repeated calls of `work` with the same bytes in one process."""
    count = max(3, total // len(source) // 4)
    begun = time.perf_counter()
    for _ in range(count):
        work(source)
    return count * len(source) / (time.perf_counter() - begun) / 1e9


def ring(source: bytes, total: int, verify: bool) -> float:
    """GB/s from the first write to the last acknowledgement; records are read by reference."""
    count, name = total // len(source), segment_name("bench", str(os.getpid()))

    def write(started) -> None:
        with Ring.attach(name) as mine:
            started.wait(SECONDS)
            for _ in range(count):
                mine.write([source], SECONDS)

    with Ring.create_or_attach(name, CAPACITY, "bench") as reader:
        begun = _start_writer(write)
        received = 0
        while received < count:
            sequences = reader.wait((), SECONDS)
            if not sequences:
                raise TimeoutError(f"the writer wrote nothing for {SECONDS} s; received {received} of {count} records")
            for sequence in sequences:
                reader.read(sequence, verify)
            reader.acknowledge(sequences)
            received += len(sequences)
        seconds = time.perf_counter() - begun
        reader.unlink()
    return count * len(source) / seconds / 1e9


def queue(source: bytes, total: int) -> float:
    """GB/s through multiprocessing.Queue, which pickles into a pipe."""
    count = max(3, total // QUEUE_DIVISOR // len(source))
    records = FORK_CONTEXT.Queue(maxsize=CAPACITY // len(source))

    def write(started) -> None:
        started.wait(SECONDS)
        for _ in range(count):
            records.put(source)

    begun = _start_writer(write)
    for _ in range(count):
        records.get(timeout=SECONDS)
    return count * len(source) / (time.perf_counter() - begun) / 1e9


def _start_writer(write: Callable) -> float:
    """Start the writer process; returns the time at which it may write."""
    started = FORK_CONTEXT.Event()
    FORK_CONTEXT.Process(target=write, args=(started,), daemon=True).start()
    time.sleep(0.2)  # the writer attaches meanwhile; a late writer would only lower the result
    started.set()
    return time.perf_counter()


def measure(size: int, total: int, rounds: int) -> dict[str, float]:
    """Median GB/s of all methods for one record size in bytes, measured in alternating rounds."""
    source = np.random.default_rng(0).bytes(size)
    works: dict[str, Callable[[], float]] = {
        "memcpy": lambda: memcpy(source, total),
        "ring": lambda: ring(source, total, verify=True),
        "ring, unverified read": lambda: ring(source, total, verify=False),
        "multiprocessing.Queue": lambda: queue(source, total),
        "checksum alone: ring's": lambda: throughput(checksum, source, total),
        "checksum alone: zlib.crc32": lambda: throughput(zlib.crc32, source, total),
        "checksum alone: zlib.adler32": lambda: throughput(zlib.adler32, source, total),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = make_bench_parser(__doc__, "a tenth of the data, one round")
    arguments = parser.parse_args()
    total, rounds = (400_000_000, 1) if arguments.quick else (4_000_000_000, 5)
    sweep_segments("webrl-bench-")
    results = {label: measure(size, total, rounds) for label, size in SIZES.items()}
    print(f"GB/s, median of {rounds}; {os.cpu_count()} CPUs, {platform.machine()}, ring of {CAPACITY >> 20} MiB\n")
    print("| | " + " | ".join(f"{label} | share of memcpy" for label in results) + " |")
    print("|---|" + "---:|---:|" * len(results))
    for name in next(iter(results.values())):
        cells = [f"{figures[name]:.2f} | {figures[name] / figures['memcpy']:.2f}" for figures in results.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for label, figures in results.items():
        print(f"\n{label}: ring / queue = {figures['ring'] / figures['multiprocessing.Queue']:.1f}", end="")
    print()
    write_json(arguments.json, {"unit": "GB/s", "rounds": rounds, "results": results})


if __name__ == "__main__":
    main()
