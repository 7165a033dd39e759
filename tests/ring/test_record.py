"""Trajectories as records, in rings and files; what is damaged is refused, named or set aside."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.ring import record
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import CHECKSUM_PAGE_BYTES, RecordError, checksum
from megatron_webrl.types import (
    COORDINATE_ACTION_KINDS,
    Action,
    JudgeStage,
    RubricFact,
    Step,
    Task,
    Trajectory,
    Verdict,
    Vote,
)
from tests.ring.support import damage

ARRAYS = [*(name for name, *_ in record.STEP_ARRAYS), record.EXPERTS]
texts = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates too: pages contain them
seconds, numbers = st.floats(0, 1e6), st.integers(0, 1000)
points = st.none() | st.tuples(numbers, numbers)


def int32s(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return st.integers(0, 2**32 - 1).map(
        lambda seed: np.random.default_rng(seed).integers(-(2**31), 2**31, shape, dtype=np.int32)
    )


actions = st.builds(
    Action, kind=st.sampled_from(COORDINATE_ACTION_KINDS), coordinate=points, end_coordinate=points,
    text=st.none() | texts, direction=st.sampled_from([None, "up", "down"]), time=st.none() | seconds,
    url=st.none() | texts, element_id=st.none() | numbers, end_element_id=st.none() | numbers, tab=st.none() | numbers,
)  # fmt: skip


@st.composite
def experts(draw: st.DrawFn, rows: int) -> np.ndarray:
    if rows < 1 or draw(st.booleans()):
        return np.zeros((0, 0, 0), np.uint8)
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    return np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, (rows, 3, 2)).astype(dtype)


@st.composite
def steps(draw: st.DrawFn, images: int) -> Step:
    prompt, response = draw(st.integers(0, 40)), draw(st.integers(0, 20))
    shown = draw(st.lists(st.integers(0, images - 1), max_size=4)) if images else []
    return Step(
        prompt_token_ids=draw(int32s(prompt)), response_token_ids=draw(int32s(response)),
        logprobs=draw(int32s(response)).view(np.float32),  # any bits, NaN and infinities among them
        versions=draw(int32s(response)), images=np.array(shown, np.int32), image_grids=draw(int32s(len(shown), 3)),
        finish_reason=draw(st.sampled_from(["stop", "length"])), action=draw(st.none() | actions),
        format_error=draw(st.none() | texts), page_changed=draw(st.booleans()),
        reasoning=draw(texts),
        response_characters=draw(st.integers(0, 2**31)), memory_characters=draw(st.integers(-1, 2**31)),
        seconds_generation=draw(seconds), seconds_browser=draw(seconds),
        cached_prompt_tokens=draw(st.integers(0, prompt)), leniencies=draw(st.lists(texts, max_size=2).map(tuple)),
        teacher_logprobs=draw(st.sampled_from([0, response]).flatmap(int32s)).view(np.float32),
        experts=draw(experts(prompt + response - 1)),
    )  # fmt: skip


facts = st.lists(st.builds(RubricFact, group=texts, description=texts, fact=texts), max_size=2).map(tuple)
stages = st.builds(
    JudgeStage, name=texts, subject=texts, decision=texts, text=texts, digest=texts, model=texts,
    errors=st.lists(texts, max_size=2).map(tuple),
)  # fmt: skip
verdicts = st.builds(
    Verdict, outcome=texts, evaluator=texts, reason=texts, dollars=seconds,
    stages=st.lists(stages, max_size=2).map(tuple),
    votes=st.lists(st.builds(Vote, model=texts, outcome=texts), max_size=2).map(tuple),
)  # fmt: skip


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    images = tuple(draw(st.lists(st.binary(max_size=50), max_size=4)))
    return Trajectory(
        ticket=draw(st.integers(0, 2**62)), index=draw(st.integers(0, 7)), group_size=8,
        restart_epoch=draw(st.integers(0, 9)), instruction=draw(texts),
        task=Task("id", draw(texts), draw(texts), draw(st.integers()), 5, draw(st.none() | texts), draw(texts),
                  facts=draw(facts)),
        steps=tuple(draw(st.lists(steps(len(images)), max_size=4))), images=images,
        reward=draw(st.sampled_from([0.0, 1.0])), outcome=draw(st.sampled_from(["success", "failure", "engine_error"])),
        temperature=draw(st.floats(0.1, 2)), seconds=draw(seconds), finished_at=draw(seconds),
        page_reward=draw(st.none() | seconds), verdict=draw(st.none() | verdicts),
    )  # fmt: skip


def example(size: int = 1000) -> Trajectory:
    random = np.random.default_rng(0)
    made = [
        Step(
            prompt_token_ids=random.integers(0, 9, 37 + index, dtype=np.int32),
            response_token_ids=random.integers(0, 9, 5, dtype=np.int32), logprobs=random.random(5, dtype=np.float32),
            versions=np.full(5, 3, np.int32), images=np.array([index], np.int32),
            image_grids=np.array([[1, 4, 6]], np.int32), finish_reason="stop",
            action=Action("left_click", coordinate=(500, 20)), teacher_logprobs=random.random(5, dtype=np.float32),
            experts=random.integers(0, 9, (41 + index, 2, 1), dtype=np.uint16),
        )
        for index in range(3)
    ]  # fmt: skip
    images = tuple(random.bytes(size) for _ in made)
    task = Task("click-test/1", "miniwob", "click-test", 1, 5)
    return Trajectory(4, 1, 8, 0, task, "Click.", tuple(made), images, 1.0, "success", 1.0, 2.5)


def joined(trajectory: Trajectory) -> bytes:
    return b"".join(record.encode_trajectory(trajectory))


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for a, b in zip(left.steps, right.steps, strict=True):
        for name in ARRAYS:
            x, y = getattr(a, name), getattr(b, name)
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        blank: dict[str, Any] = dict.fromkeys(ARRAYS)
        assert dataclasses.replace(a, **blank) == dataclasses.replace(b, **blank)
    assert [bytes(image) for image in left.images] == [bytes(image) for image in right.images]
    assert dataclasses.replace(left, steps=(), images=()) == dataclasses.replace(right, steps=(), images=())


@settings(max_examples=50, derandomize=True)
@given(trajectories(), st.booleans())
def test_any_trajectory_comes_back_as_it_was(trajectory: Trajectory, copy: bool) -> None:
    assert_same(record.decode_trajectory(joined(trajectory), copy), trajectory)


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_any_damage_is_refused_or_harmless_to_the_structure(data: st.DataObject) -> None:
    whole = bytearray(joined(example(40)))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = record.decode_trajectory(bytes(whole))
    except RecordError:
        return
    assert [len(image) for image in decoded.images] == [40] * 3  # only the content of arrays and images can differ
    assert dataclasses.replace(decoded, steps=(), images=()) == dataclasses.replace(example(40), steps=(), images=())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def with_header(text: bytes) -> bytes:
    """A record with this description, whose header and checksum are right."""
    total = 32 + -(-len(text) // 8) * 8
    header = struct.pack("<8sIIQQ", record.MAGIC, record.FORMAT_VERSION, zlib.crc32(text), total, len(text))
    return (header + text).ljust(total, b"\0")


def described(description: object) -> bytes:
    return with_header(json.dumps(description).encode())


def description_of(trajectory: Trajectory) -> dict[str, Any]:
    whole = joined(trajectory)
    return json.loads(whole[32 : 32 + struct.unpack_from("<Q", whole, 24)[0]])


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_a_description_of_any_content_raises_only_the_errors_of_records(data: st.DataObject) -> None:
    description = description_of(example())
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key in range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ():
            places.append((value, key))
            visit(value[key])

    visit(description)
    holder, key = data.draw(st.sampled_from(places))
    if data.draw(st.booleans()):
        holder[key] = data.draw(JSON_VALUES)
    else:
        del holder[key]
    with suppress(RecordError):
        assert isinstance(record.decode_trajectory(described(description)), Trajectory)


def test_arrays_and_images_are_views_of_the_ring_and_copies_on_request(ring: Ring) -> None:
    trajectory = example()
    buffer = ring.read(ring.write(record.encode_trajectory(trajectory), 1))
    by_reference, copied = record.decode_trajectory(buffer), record.decode_trajectory(buffer, copy=True)
    whole = np.frombuffer(buffer, np.uint8)
    for step, copied_step in zip(by_reference.steps, copied.steps, strict=True):
        for name in ARRAYS:
            array = getattr(step, name)
            assert np.shares_memory(array, whole)
            assert array.flags.aligned
            assert not array.flags.writeable
            assert not np.shares_memory(getattr(copied_step, name), whole)
    assert all(np.shares_memory(np.frombuffer(image, np.uint8), whole) for image in by_reference.images)
    ring.acknowledge([0])
    ring.write([bytes(len(buffer))], 1)
    assert_same(copied, trajectory)


def test_each_screenshot_is_stored_once_and_is_not_copied_while_encoding() -> None:
    trajectory = example(100_000)
    buffers = record.encode_trajectory(trajectory)
    assert all(any(buffer is image for buffer in buffers) for image in trajectory.images)
    assert sum(len(buffer) for buffer in buffers) < 3 * 100_000 + 4000


def test_truncated_and_foreign_bytes_and_other_formats_are_refused() -> None:
    whole = joined(example())
    for data, message in (
        *((whole[:length], "truncated") for length in (0, 7, 31, 32, 200, -1)),
        (b"PNG" + whole[3:], "not a record: it begins with b'PNG"),
        (whole[:8] + struct.pack("<I", 9) + whole[12:], f"format 9, this program reads {record.FORMAT_VERSION}"),
        (whole + b"x", "followed by foreign bytes"),
        (whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], "CRC-32"),
    ):
        with pytest.raises(RecordError, match=message):
            record.decode_trajectory(data)


def test_a_description_that_does_not_fit_is_refused() -> None:
    description = description_of(dataclasses.replace(example(), steps=(), images=()))
    for key, value, message in (
        ("images", [10**30], "its description gives"),
        ("steps", [{"lengths": [5, 3, 0, 2]}], r"lengths \[5, 3, 0, 2\] of a step"),
        ("task", {"surprise": 1}, "surprise"),
    ):
        with pytest.raises(RecordError, match=message):
            record.decode_trajectory(described(description | {key: value}))
    for text in (*(json.dumps(other).encode() for other in (None, 3, [], "x", {}, [[1]])), b"[" * 200_000):
        with pytest.raises(RecordError, match="does not fit"):
            record.decode_trajectory(with_header(text))


def test_a_trajectory_with_wrong_types_is_refused() -> None:
    trajectory = example()
    for name, value, message in (
        ("logprobs", np.zeros(5), r"steps\[0\].logprobs is float64 \[5\], must be float32 \[5\]"),
        ("versions", np.zeros(4, np.int32), r"steps\[0\].versions is int32 \[4\], must be int32 \[5\]"),
        ("image_grids", np.zeros((1, 2), np.int32), r"image_grids is int32 \[1, 2\], must be int32 \[1, 3\]"),
        ("images", np.array([3], np.int32), r"images=\[3\] names images outside 0..2"),
        ("images", np.array([-1], np.int32), r"images=\[-1\] names images outside 0..2"),
        ("teacher_logprobs", np.zeros(2, np.float32), r"teacher_logprobs is float32 \[2\], must be float32 \[5\]"),
        ("experts", np.zeros((5, 3, 2), np.uint8), r"experts is uint8 \[5, 3, 2\], must be uint8 or uint16"),
        ("finish_reason", object(), "cannot be written into a record"),
    ):
        changed = dataclasses.replace(trajectory.steps[0], **{name: value})
        with pytest.raises(RecordError, match=message):
            record.encode_trajectory(dataclasses.replace(trajectory, steps=(changed,)))


def test_damaged_records_are_set_aside_up_to_a_number_and_a_full_disk_does_not_matter(
    ring: Ring, tmp_path: Path
) -> None:
    kept, whole = tmp_path / "set" / "aside", record.encode_trajectory(example())
    numbers = [ring.write(whole, 1) for _ in range(3)]
    damage(ring, 1)
    read = [record.read_trajectory(ring, number, kept) for number in numbers]
    assert [each is not None for each in read] == [True, False, True]
    [file] = kept.iterdir()
    assert (file.name, file.read_bytes()) == ("1.record", bytes(ring.read(1, verify=False)))
    assert sorted(record.undamaged_trajectories(ring, numbers)) == [0, 2]
    for _ in range(record.MAX_KEPT + 5):
        number = ring.write([b"no trajectory"], 1)
        assert record.read_trajectory(ring, number, kept) is None
    assert len(list(kept.iterdir())) == record.MAX_KEPT
    assert record.read_trajectory(ring, number, file / "no folder") is None


RECORDS = [b"first", b"", np.random.default_rng(0).bytes(20_000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "demonstrations.records"
    with record.RecordFileWriter(path) as file:
        for each in RECORDS:
            file.write([each[:3], memoryview(each)[3:]])
        assert not path.exists()
    return path


def test_the_records_of_a_file_come_back_in_order_and_nothing_else_is_left(path: Path) -> None:
    assert list(record.read_record_file(path)) == RECORDS
    record.RecordFileWriter(path.with_name("empty")).close()
    assert list(record.read_record_file(path.with_name("empty"))) == []
    path.with_name("empty").unlink()

    def fail() -> None:
        with record.RecordFileWriter(path.with_name("never")) as file:
            file.write([b"x"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_damaged_or_truncated_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    lengths = [*range(120), *range(120, len(whole), 997), len(whole) - 1]
    for data, message in (
        *((whole[:length], r"truncated|not a record file") for length in lengths),
        (whole.replace(b"first", b"fjrst"), "record 0 of 5 bytes does not match its checksum"),
        (whole + b"more", "4 bytes follow"),
        (b"other" * 100, "is not a record file"),
    ):
        path.write_bytes(data)
        with pytest.raises(RecordError, match=message):
            list(record.read_record_file(path))


@pytest.mark.parametrize("size", [0, 1, CHECKSUM_PAGE_BYTES - 1, CHECKSUM_PAGE_BYTES, 5 * CHECKSUM_PAGE_BYTES + 13])
def test_the_checksum_detects_single_bits_swapped_words_swapped_pages_and_stale_pages(size: int) -> None:
    data, page = bytearray(np.random.default_rng(size).bytes(size)), CHECKSUM_PAGE_BYTES
    expected = checksum(bytes(data))
    assert checksum(memoryview(data)) == expected
    for position in range(0, size, max(1, size // 50)):
        data[position] ^= 1 << position % 8
        assert checksum(memoryview(data)) != expected
        data[position] ^= 1 << position % 8
    if size < 3 * page:
        return
    for step in (8, page):
        swapped = data[step : 2 * step] + data[:step] + data[2 * step :]
        assert checksum(memoryview(swapped)) != expected
    assert checksum(memoryview(data[:page] + bytes(page) + data[2 * page :])) != expected
