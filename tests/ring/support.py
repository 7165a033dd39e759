"""Helpers of the ring's tests: damage, a kill at a chosen line, checksummed payloads."""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np

import megatron_webrl
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import SHM_FOLDER
from tests.waiting import exit_code, fork

RUN, CAPACITY = "test run", 64 * 1024
PREFIX = f"webrl-test-{os.getpid()}-"
T = TypeVar("T")
SOURCES = str(Path(megatron_webrl.__file__).parent)


def damage(ring: Ring, sequence: int, position: int = 0) -> None:
    record = np.frombuffer(ring.read(sequence), np.uint8)
    offset = record.ctypes.data - np.frombuffer(ring._data, np.uint8).ctypes.data
    with (SHM_FOLDER / ring.name).open("r+b") as file:
        file.seek(ring._layout.data_offset + offset + position % len(record))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL


def killed_at_line(line: int, prepare: Callable[[], T], work: Callable[[T], object]) -> bool:
    """Run `work` in a fork that kills itself before its nth line of the package; whether it reached that line."""

    def run() -> None:
        prepared = prepare()
        remaining = line

        def trace(frame: FrameType, event: str, argument: object):
            nonlocal remaining
            if not frame.f_code.co_filename.startswith(SOURCES):
                return None
            if event == "line":
                remaining -= 1
                if remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work(prepared)

    code = exit_code(fork(run))
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def payload(number: int, size: int) -> bytes:
    """Number, size and checksum, then noise. `size` is at least 24 bytes."""
    noise = np.random.default_rng(number).bytes(size - 24)
    return b"".join(value.to_bytes(8, "little") for value in (number, size, zlib.crc32(noise))) + noise


def check(record: memoryview) -> int:
    number, size, crc = (int.from_bytes(record[i : i + 8], "little") for i in (0, 8, 16))
    assert len(record) == size
    assert zlib.crc32(record[24:]) == crc
    return number
