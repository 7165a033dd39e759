"""Drill: no damage of a record raises anything but the errors of records.

    python -m tools.drills.damaged_records [--quick] [--json FILE]

Flips bits in each byte of 200 records (5 in the short form): in a ring, whose checksum must refuse each of them; in
their bytes, where the checksum of the ring does not protect the decoder; and in files of records. Then decodes 10,000
records (500) whose description has other values, types, keys or nesting, with right checksums.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_webrl.ring import record
from megatron_webrl.ring.record import (
    RecordFileWriter,
    decode_trajectory,
    encode_trajectory,
    read_record_file,
    read_trajectory,
)
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import RecordCorrupt, RecordError
from megatron_webrl.types import Action, JudgeStage, Trajectory, Verdict
from tests.trajectories import trajectory
from tools.drills.report import Findings, run

RECORDS, MUTATED = 200, 10_000
SHORT_RECORDS, SHORT_MUTATED = 5, 500
FILE_RECORDS = 2  # of a file, each byte of which is damaged
MEMORY = "/dev/shm"  # for files that are written thousands of times
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**63, 2**70, -(2**63), 1.5, float("nan"), float("inf"), "", "x", "\ud800", "7", [], [[]],
    [1, 2, 3], [-1, -1, -1], [2**40, 0, 0], {}, {"kind": "left_click"}, {"a": {"b": [None]}}, "x" * 5000,
)  # fmt: skip


def measure(quick: bool) -> Findings:
    """Damage records in each place."""
    logging.disable(logging.ERROR)  # each damaged record is an error in the log
    findings, rng = Findings(), random.Random(19)
    records = [_record(number) for number in range(SHORT_RECORDS if quick else RECORDS)]
    counts: Counter[str] = Counter()
    try:
        for number, data in enumerate(records):
            findings.problems += _damage_bytes(data, rng, counts, f"record {number}")
        findings.problems += _damage_in_ring(records, rng, counts)
        findings.problems += _damage_file(records[:FILE_RECORDS], rng, counts)
        findings.problems += _mutate(SHORT_MUTATED if quick else MUTATED, rng, counts)
    finally:
        logging.disable(logging.NOTSET)
    findings.figures = {"records": len(records), "bytes": sum(map(len, records)), **counts}
    return findings


def _record(number: int) -> bytes:
    """A record with steps, actions, images and a verdict in changing numbers."""
    rng = np.random.default_rng(number)
    made = trajectory(number, number % 4, steps=number % 4, seed=number, prompt=int(rng.integers(1, 12)))
    images = tuple(rng.bytes(int(rng.integers(1, 60))) for _ in range(number % 3))
    steps = []
    for index, step in enumerate(made.steps):
        used = np.arange(min(index, len(images)), dtype=np.int32)
        action = Action("left_click", coordinate=(5, 6)) if index % 2 else Action("type", text="ä\n")
        steps.append(replace(step, action=action, images=used, image_grids=np.ones((len(used), 3), np.int32)))
    verdict = None
    if number % 2:
        stage = JudgeStage("rubric", "screenshot 3", "yes", "a reply", "0123", "a model", errors=("truncated",))
        verdict = Verdict("success", "judge", "rubric", stages=(stage,), dollars=0.5)
    return b"".join(encode_trajectory(replace(made, steps=tuple(steps), images=images, verdict=verdict)))


def _decoded(decode: Callable[[], object], counts: Counter[str], kind: str) -> str | None:
    """Run a reader; returns what it raised that it may not raise."""
    try:
        decode()
    except (RecordError, RecordCorrupt):
        counts[f"{kind}: refused"] += 1
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    else:
        counts[f"{kind}: read"] += 1
    return None


def _damage_bytes(data: bytes, rng: random.Random, counts: Counter[str], name: str) -> list[str]:
    problems, damaged = [], bytearray(data)
    for position in range(len(data)):
        damaged[position] ^= rng.randint(1, 255)
        if problem := _decoded(lambda: decode_trajectory(bytes(damaged)), counts, "bytes without a checksum"):
            problems.append(f"{name}, byte {position}: {problem}")
        damaged[position] = data[position]
    return problems


def _damage_in_ring(records: list[bytes], rng: random.Random, counts: Counter[str]) -> list[str]:
    problems = []
    with (
        Ring.create_or_attach(f"webrl-drill-{os.getpid()}", 2**20, "drill") as ring,
        tempfile.TemporaryDirectory(dir=MEMORY) as name,
    ):
        for data in records:
            number = ring.write([data], 1)
            start = ring._descriptor(ring._slot(number))[0] % ring.capacity
            for position in range(start, start + len(data)):
                kept = ring._data[position]
                ring._data[position] = kept ^ rng.randint(1, 255)
                try:
                    if read_trajectory(ring, number, Path(name)) is None:
                        counts["bytes in a ring: set aside"] += 1
                    else:
                        problems.append(f"record {number}: damage of byte {position - start} was not noticed")
                except BaseException as error:
                    problems.append(f"record {number}, byte {position - start}: {type(error).__name__}: {error}")
                ring._data[position] = kept
            if read_trajectory(ring, number, Path(name)) is None:
                problems.append(f"record {number} is refused although it is whole")
            ring.acknowledge([number])
        ring.unlink()
    return problems


def _damage_file(records: list[bytes], rng: random.Random, counts: Counter[str]) -> list[str]:
    problems = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        path = Path(name, "records")
        with RecordFileWriter(path) as file:
            for data in records:
                file.write([data])
        whole = path.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= rng.randint(1, 255)
            path.write_bytes(damaged)
            if problem := _decoded(
                lambda: [*map(decode_trajectory, read_record_file(path))], counts, "bytes of a file"
            ):
                problems.append(f"file, byte {position}: {problem}")
    if counts["bytes of a file: read"]:
        problems.append(f"{counts['bytes of a file: read']} damaged files were read")
    return problems


def _mutate(count: int, rng: random.Random, counts: Counter[str]) -> list[str]:
    problems, examples = [], [_record(number) for number in (1, 2, 3, 7)]
    for number in range(count):
        data = rng.choice(examples)
        size = struct.unpack_from("<Q", data, 24)[0]
        description = json.loads(data[32 : 32 + size])
        for _ in range(rng.choice((1, 1, 2, 5))):
            _change(description, rng)
        text = json.dumps(description).encode(errors="surrogatepass")
        body = (text + bytes(-len(text) % 8) + data[32 + size + -size % 8 :])[: len(text) + rng.choice((2**20, 100))]
        header = struct.pack(
            "<8sIIQQ", record.MAGIC, record.FORMAT_VERSION, zlib.crc32(text), 32 + len(body), len(text)
        )

        def decode(content: bytes = header + body) -> None:
            if not isinstance(decode_trajectory(content), Trajectory):
                raise TypeError("not a trajectory")

        if problem := _decoded(decode, counts, "mutated descriptions"):
            problems.append(f"description {number}: {problem}: {text[:200]!r}")
    return problems


def _change(description: dict[str, Any], rng: random.Random) -> None:
    """Replace, delete, add or nest one value of a description."""
    holder: Any = description
    while True:
        keys = list(range(len(holder)) if isinstance(holder, list) else holder)
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(holder[key], dict | list) or not holder[key] or rng.random() < 0.3:
            break
        holder = holder[key]
    kind = rng.random()
    if kind < 0.6:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind < 0.8:
        del holder[key]
    elif kind < 0.9 and isinstance(holder, dict):
        holder[rng.choice(("extra", "steps", "ticket", ""))] = copy.deepcopy(rng.choice(VALUES))
    else:
        holder[key] = [holder[key]]


if __name__ == "__main__":
    sys.exit(run("damaged_records", __doc__.split("\n")[0], measure))
