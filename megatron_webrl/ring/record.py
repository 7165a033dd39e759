"""Trajectories as bytes, without pickle: records, files of records, and records that are damaged.

    magic | format | crc of JSON | total bytes | JSON bytes      header, 32 bytes
    JSON                              all other fields, and the lengths of arrays and images
    arrays of step 0, step 1, ...     each aligned to 8 bytes: STEP_ARRAYS in order, then the experts
    encoded screenshots               one after the other, each once

Arrays are decoded as views of the buffer. The ring or the record file adds a checksum of the whole record.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from megatron_webrl.ring.segment import RecordCorrupt, RecordError, RingError, checksum
from megatron_webrl.types import Action, JudgeStage, RubricFact, Step, Task, Trajectory, Verdict, Vote
from megatron_webrl.util import atomic_file

MAGIC = b"WEBRLREC"
FORMAT_VERSION = 8
ALIGNMENT = 8
_HEADER = struct.Struct("<8sIIQQ")

# name, dtype, which of the step's lengths (prompt, response, images, scored) is the first dimension, trailing shape
_PROMPT, _RESPONSE, _IMAGES, _SCORED = 0, 1, 2, 3
STEP_ARRAYS: tuple[tuple[str, str, int, tuple[int, ...]], ...] = (
    ("prompt_token_ids", "<i4", _PROMPT, ()),
    ("response_token_ids", "<i4", _RESPONSE, ()),
    ("logprobs", "<f4", _RESPONSE, ()),
    ("versions", "<i4", _RESPONSE, ()),
    ("images", "<i4", _IMAGES, ()),
    ("image_grids", "<i4", _IMAGES, (3,)),
    ("teacher_logprobs", "<f4", _SCORED, ()),
)
EXPERTS = "experts"  # of a mixture of experts; dtype and shape [rows, layers, top_k] are in the description
_EXPERT_DTYPES = ("uint8", "uint16")
_ARRAYS = (*(name for name, *_ in STEP_ARRAYS), EXPERTS)
_NO_SCALARS = {*_ARRAYS, "action", "task", "steps", "images", "browser_images", "page_reward", "verdict"}
_STEP_SCALARS = tuple(field.name for field in fields(Step) if field.name not in _NO_SCALARS)
_KINDS = {"int": int, "float": float, "str": str}
_SCALARS = {field.name: _KINDS[str(field.type)] for field in fields(Trajectory) if field.name not in _NO_SCALARS}
Buffer = bytes | memoryview


def encode_trajectory(trajectory: Trajectory) -> list[Buffer]:
    """The record as buffers to write in order. Arrays and images are referenced, not copied.

    Raises RecordError if an array's dtype or shape differs from types.Step, or if a step names a missing image.
    """
    lengths = [_lengths(step, index, len(trajectory.images)) for index, step in enumerate(trajectory.steps)]
    description: dict[str, Any] = {name: kind(getattr(trajectory, name)) for name, kind in _SCALARS.items()}
    description["task"], description["page_reward"] = asdict(trajectory.task), trajectory.page_reward
    description["verdict"] = None if trajectory.verdict is None else asdict(trajectory.verdict)
    description["steps"] = [
        {name: getattr(step, name) for name in _STEP_SCALARS}
        | {"action": None if step.action is None else asdict(step.action), "lengths": length}
        | {EXPERTS: [step.experts.dtype.name, *step.experts.shape]}
        for step, length in zip(trajectory.steps, lengths, strict=True)
    ]
    description["images"] = [len(image) for image in trajectory.images]
    description["browser_images"] = trajectory.browser_images
    try:
        text = json.dumps(description, separators=(",", ":"), default=_scalar).encode()
    except TypeError as error:
        raise RecordError(f"trajectory of ticket {trajectory.ticket}, index {trajectory.index}: {error}") from error
    buffers: list[Buffer] = [text, _padding(len(text))]
    for step in trajectory.steps:
        for name in _ARRAYS:
            array = np.ascontiguousarray(getattr(step, name))
            buffers += [array.data.cast("B") if array.size else b"", _padding(array.nbytes)]
    buffers += trajectory.images
    total = _HEADER.size + sum(len(buffer) for buffer in buffers)
    return [_HEADER.pack(MAGIC, FORMAT_VERSION, zlib.crc32(text), total, len(text)), *(b for b in buffers if len(b))]


def decode_trajectory(buffer: bytes | bytearray | memoryview, copy: bool = False) -> Trajectory:
    """Decode one record. Raises RecordError if `buffer` is not one complete record.

    Unless `copy`, arrays and images are read-only views of `buffer` (images as memoryview), valid while it is.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    try:
        description, position = _description(view)
        return _build(view, description, position, copy)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(
            f"record of {len(view)} bytes has a description that does not fit format {FORMAT_VERSION}: {error!r}"
        ) from error


def _build(view: memoryview, description: dict[str, Any], position: int, copy: bool) -> Trajectory:
    layouts = [_array_layouts(step) for step in description["steps"]]
    expected = position + sum(_padded(_bytes(dtype, shape)) for each in layouts for _, dtype, shape in each)
    expected += sum(description["images"])
    if expected != len(view):
        raise RecordError(f"record has {len(view)} bytes, its description gives {expected}; it is damaged")
    steps = []
    for described, layout in zip(description["steps"], layouts, strict=True):
        arrays: dict[str, Any] = {}
        for name, dtype, shape in layout:
            size = _bytes(dtype, shape)
            flat = np.frombuffer(view[position : position + size], dtype).reshape(shape)
            arrays[name] = flat.copy() if copy else flat
            position += _padded(size)
        scalars = {name: described[name] for name in _STEP_SCALARS}
        scalars["leniencies"] = tuple(scalars["leniencies"])
        steps.append(Step(action=_action(described["action"]), **arrays, **scalars))
    images: list[Buffer] = []
    for size in description["images"]:
        image = view[position : position + size]
        images.append(bytes(image) if copy else image)
        position += size
    scalars = {name: kind(description[name]) for name, kind in _SCALARS.items()}
    shown = description.get("browser_images")
    shown = None if shown is None else tuple(shown)
    return Trajectory(
        task=_task(description["task"]), steps=tuple(steps), images=cast(tuple[bytes, ...], tuple(images)),
        page_reward=description["page_reward"], browser_images=shown, verdict=_verdict(description["verdict"]),
        **scalars,
    )  # fmt: skip


def _description(view: memoryview) -> tuple[dict[str, Any], int]:
    """The JSON description and the offset of the arrays."""
    if len(view) < _HEADER.size:
        raise RecordError(f"record is truncated: {len(view)} bytes, its header alone has {_HEADER.size}")
    magic, version, crc, total, length = _HEADER.unpack(view[: _HEADER.size])
    if magic != MAGIC:
        raise RecordError(f"not a record: it begins with {magic!r}, not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise RecordError(
            f"record has format {version}, this program reads {FORMAT_VERSION}; use the program that wrote it"
        )
    if total != len(view):
        problem = "truncated" if len(view) < total else "followed by foreign bytes"
        raise RecordError(f"record is {problem}: {len(view)} bytes, its header says {total}")
    if _HEADER.size + length > total:
        raise RecordError(f"record is damaged: a description of {length} bytes in a record of {total}")
    text = view[_HEADER.size : _HEADER.size + length]
    if zlib.crc32(text) != crc:
        raise RecordError(f"record is damaged: the description's CRC-32 is {zlib.crc32(text):08x}, not {crc:08x}")
    return json.loads(bytes(text)), _HEADER.size + _padded(length)


def _lengths(step: Step, index: int, images: int) -> list[int]:
    """Lengths of a step's prompt, response, images and scored tokens (none or all), after checking its arrays."""
    scored = len(step.response_token_ids) if step.teacher_logprobs.size else 0
    lengths = [len(step.prompt_token_ids), len(step.response_token_ids), len(step.images), scored]
    for name, dtype, which, shape in STEP_ARRAYS:
        data = getattr(step, name)
        expected = (lengths[which], *shape)
        if data.dtype != np.dtype(dtype) or data.shape != expected:
            raise RecordError(
                f"steps[{index}].{name} is {data.dtype} {list(data.shape)}, must be {np.dtype(dtype)} {list(expected)}"
            )
    if problem := _experts_problem(step.experts.dtype.name, step.experts.shape, lengths):
        raise RecordError(f"steps[{index}].{problem}")
    if lengths[_IMAGES] and not 0 <= step.images.min() <= step.images.max() < images:
        raise RecordError(f"steps[{index}].images={step.images.tolist()} names images outside 0..{images - 1}")
    return lengths


def _array_layouts(described: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each array of a step."""
    lengths = described["lengths"]
    if len(lengths) != 4 or min(lengths) < 0 or lengths[_SCORED] not in (0, lengths[_RESPONSE]):
        raise RecordError(f"record is damaged: lengths {lengths} of a step")
    dtype, *shape = described[EXPERTS]
    if problem := _experts_problem(dtype, shape, lengths):
        raise RecordError(f"record is damaged: {problem}")
    fixed = [(name, dtype, (lengths[which], *trailing)) for name, dtype, which, trailing in STEP_ARRAYS]
    return [*fixed, (EXPERTS, np.dtype(dtype).newbyteorder("<").str, tuple(shape))]


def _experts_problem(dtype: str, shape: Sequence[int], lengths: Sequence[int]) -> str:
    """Why a step cannot have such experts; empty: it can."""
    rows = lengths[_PROMPT] + lengths[_RESPONSE] - 1
    valid = len(shape) == 3 and min(shape) >= 0 and (shape[0] == rows or not any(shape))
    if dtype in _EXPERT_DTYPES and valid:
        return ""
    return f"experts is {dtype} {list(shape)}, must be uint8 or uint16 [{rows}, layers, top_k], or [0, 0, 0]"


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _action(described: dict[str, Any] | None) -> Action | None:
    if described is None:
        return None
    pairs = {name: value for name, value in described.items() if isinstance(value, list)}
    return Action(**described | {name: (value[0], value[1]) for name, value in pairs.items()})


def _task(described: dict[str, Any]) -> Task:
    return Task(**described | {"facts": tuple(RubricFact(**fact) for fact in described.get("facts", ()))})


def _verdict(described: dict[str, Any] | None) -> Verdict | None:
    if described is None:
        return None
    stages = tuple(JudgeStage(**stage | {"errors": tuple(stage["errors"])}) for stage in described["stages"])
    return Verdict(**described | {"stages": stages, "votes": tuple(Vote(**vote) for vote in described["votes"])})


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written into a record")


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> bytes:
    return bytes(_padded(size) - size)


FILE_MAGIC = b"WEBRLFIL"
FILE_FORMAT_VERSION = 1
_END = 2**64 - 1  # in place of a length: the trailer, whose second number is the count of records
_HEAD = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<QQ")


class RecordFileWriter(AbstractContextManager["RecordFileWriter"]):
    """Writes records to a temporary file next to `path`, and renames it when it is closed without an error."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = atomic_file.temporary_path(self.path)
        self._file: BinaryIO | None = self._temporary.open("wb")
        self._file.write(_HEAD.pack(FILE_MAGIC, FILE_FORMAT_VERSION))
        self.records = 0

    def write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Append one record, the buffers one after the other; returns its position, for `read_record`."""
        if self._file is None:
            raise RecordError(f"record file {self.path} is closed; nothing can be added to it")
        record, position = b"".join(buffers), self._file.tell()
        self._file.write(_ENTRY.pack(len(record), checksum(record)))
        self._file.write(record)
        self.records += 1
        return position

    def close(self) -> None:
        """Write the trailer, sync the file and rename it. A second call does nothing. Raises OSError."""
        if self._file is None:
            return
        try:
            self._file.write(_ENTRY.pack(_END, self.records))
            self._file.flush()
            os.fsync(self._file.fileno())
            atomic_file.publish(self._temporary, self.path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary file. Without effect after `close`."""
        if self._file is not None:
            with suppress(OSError):  # of bytes that were never written
                self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def read_record_file(path: str | Path) -> Iterator[bytes]:
    """Yield the records of a file in order, one in memory at a time. Raises RecordError for a damaged file."""
    path = Path(path)
    size, count = path.stat().st_size, 0
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if head[:8] != FILE_MAGIC or len(head) < _HEAD.size:
            raise RecordError(f"{path} is not a record file: it begins with {head[:8]!r}, not {FILE_MAGIC!r}")
        version = _HEAD.unpack(head)[1]
        if version != FILE_FORMAT_VERSION:
            raise RecordError(
                f"{path} has format {version}, this program reads {FILE_FORMAT_VERSION}; use the one that wrote it"
            )
        while True:
            if (entry := _entry(file)) is None:
                raise RecordError(f"{path} is truncated after {count} records, at byte {size}")
            length, expected = entry
            if length == _END:
                break
            if file.tell() + length > size:
                remaining = size - file.tell()
                raise RecordError(f"{path} is truncated: record {count} claims {length} bytes, {remaining} follow")
            record = file.read(length)
            if checksum(record) != expected:
                raise RecordError(f"{path}: record {count} of {length} bytes does not match its checksum")
            yield record
            count += 1
        if expected != count or file.tell() != size:
            raise RecordError(
                f"{path} is damaged: {count} records, its trailer says {expected}, {size - file.tell()} bytes follow"
            )


def read_record(path: str | Path, position: int) -> bytes:
    """The record at a position of a file. Raises RecordError for a damaged file, OSError."""
    with Path(path).open("rb") as file:
        file.seek(position)
        length, expected = _entry(file) or (_END, 0)
        if length > os.fstat(file.fileno()).st_size:
            raise RecordError(f"{path} has no record at byte {position}")
        record = file.read(length)
    if len(record) < length or checksum(record) != expected:
        raise RecordError(f"{path}: the record of {length} bytes at byte {position} does not match its checksum")
    return record


def count_records(path: str | Path) -> int:
    """The number of records by the trailer of a file. Raises RecordError for a file without a trailer."""
    with Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _ENTRY.size))
        length, count = _entry(file) or (0, 0)
    if length != _END:
        raise RecordError(f"{path} is truncated: it has no trailer")
    return count


def _entry(file: BinaryIO) -> tuple[int, int] | None:
    """Length and checksum of the next record, or _END and the number of records; None: the file is truncated."""
    entry = file.read(_ENTRY.size)
    return _ENTRY.unpack(entry) if len(entry) == _ENTRY.size else None


log = logging.getLogger(__name__)

FOLDER = "damaged_records"  # of a run
MAX_KEPT = 20  # files in that folder


class RecordReader(Protocol):
    """A ring, or another source of numbered records."""

    def read(self, sequence: int, verify: bool = True) -> Buffer: ...


def read_trajectory(records: RecordReader, sequence: int, folder: Path) -> Trajectory | None:
    """The trajectory of a record, as views of it; None if it is damaged: its bytes are then in a file of `folder`."""
    try:
        return decode_trajectory(records.read(sequence))
    except (RecordCorrupt, RecordError) as error:
        log.error("record %d is damaged: %s", sequence, error)
        with suppress(RingError, OSError):  # the place of the record, or the disk, may be damaged, too
            data = records.read(sequence, verify=False)
            folder.mkdir(parents=True, exist_ok=True)
            if len(data) and len(list(folder.iterdir())) < MAX_KEPT:
                (folder / f"{sequence}.record").write_bytes(data)
        return None


def undamaged_trajectories(records: RecordReader, sequences: Iterable[int]) -> dict[int, Trajectory]:
    """The trajectories of the records that are not damaged, by number."""
    found = {}
    for sequence in sequences:
        with suppress(RecordCorrupt, RecordError):
            found[sequence] = decode_trajectory(records.read(sequence))
    return found
