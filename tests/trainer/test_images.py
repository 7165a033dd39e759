"""Prefetched pixels: bit-identical to the processor's, in bounded memory, in the order of use."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.images import ImagePrefetcher, ImagePreparationError, PrefetchedPixels, WaitTimer
from tests.trajectories import screenshot

LIMIT = 120.0
SIDE = 64
BLOCK = SIDE * SIDE * 3 + len(screenshot(0, SIDE, SIDE)) + 64
"""At least the bytes that one screenshot takes in the buffer."""


class Bench:
    def __init__(self, processor: Processor, threads: int, size: int, seconds: float = LIMIT) -> None:
        self.processor, self.wait_timer = processor, WaitTimer()
        self.prefetcher = ImagePrefetcher(processor, torch.device("cpu"), threads, size, self.wait_timer, seconds)

    def schedule(self, *images: bytes, passes: int = 1) -> PrefetchedPixels:
        grids = [(t, h, w) for t, h, w in self.processor.grids(images).tolist()]
        episodes = {image: f"ticket 7, episode {index}" for index, image in enumerate(images)}
        return self.prefetcher.schedule(list(zip(images, grids, strict=True)), episodes, passes)


Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest.fixture
def make(processor: Processor) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(threads: int = 1, blocks: int = 64, seconds: float = LIMIT) -> Bench:
        made.append(Bench(processor, threads, blocks * BLOCK, seconds))
        return made[-1]

    yield bench
    for one in made:
        one.prefetcher.close()


def shots(count: int, first: int = 0) -> list[bytes]:
    return [screenshot(first + place, SIDE, SIDE) for place in range(count)]


def encoded(width: int, height: int, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(screenshot(width, width, height))).save(buffer, kind)
    return buffer.getvalue()


def test_prefetched_pixels_equal_the_processors_bit_for_bit(make: Make) -> None:
    bench = make()
    pictures = [
        encoded(w, h, k) for w, h, k in ((64, 64, "PNG"), (160, 224, "JPEG"), (150, 210, "WEBP"), (300, 90, "PNG"))
    ]
    grey = io.BytesIO()
    Image.new("LA", (96, 64), (90, 30)).save(grey, "PNG")
    pictures.append(grey.getvalue())
    rows = [pictures[:2], pictures[2:], pictures[1:4], pictures[::-1]]
    made = [bench.schedule(*images, passes=2) for images in rows]
    for _ in range(2):
        for pixels, images in zip(made, rows, strict=True):
            assert torch.equal(pixels(), bench.processor.pixels(images)[0])
    assert bench.prefetcher.started_images == len(pictures)  # each once, whatever the number of rows and passes
    assert bench.prefetcher.used_bytes == 0


def test_images_wait_for_room_and_are_shared_in_any_order(make: Make) -> None:
    bench, pictures = make(blocks=3), shots(8)
    rows = [[pictures[i], pictures[(i + 1) % 8]] for i in range(8)]
    made = [bench.schedule(*images, passes=3) for images in rows]
    assert 0 < bench.prefetcher.started_images <= 3
    for _ in range(3):
        for pixels, images in zip(made, rows, strict=True):
            assert torch.equal(pixels(), bench.processor.pixels(images)[0])
            assert bench.prefetcher.used_bytes <= bench.prefetcher.buffer_bytes
    assert bench.prefetcher.used_bytes == 0
    assert bench.prefetcher.started_images == 3 * 8 + 1  # each once in a pass; the first one also before the last row
    made = [bench.schedule(picture) for picture in pictures]
    for place in (4, 0, 2, 2, 1, 3, 4, 7, 5, 6):  # in another order and more often than scheduled
        assert torch.equal(made[place](), bench.processor.pixels([pictures[place]])[0])
    assert bench.prefetcher.used_bytes == 0


def test_an_image_that_cannot_be_decoded_is_named(make: Make) -> None:
    bench, (whole,) = make(), shots(1)
    row = bench.schedule(whole, screenshot(1, SIDE, SIDE)[:-2000])
    with pytest.raises(
        ImagePreparationError, match=r"a screenshot of ticket 7, episode 1 cannot be trained on: .*truncated or dam"
    ):
        row()


def test_an_image_larger_than_the_buffer_is_prepared_once_it_is_needed(make: Make) -> None:
    bench, picture = make(blocks=1), screenshot(0, 2 * SIDE, SIDE)
    row = bench.schedule(picture)
    assert bench.prefetcher.started_images == 0
    assert torch.equal(row(), bench.processor.pixels([picture])[0])
    assert bench.prefetcher.used_bytes == 0


def test_waiting_is_measured_and_a_timeout_names_the_setting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, (first, second, third) = make(seconds=0.3), shots(3)
    row = bench.schedule(first)
    (image,) = row.images
    assert image.patches is not None
    image.patches.result(LIMIT)
    assert row().numel() > 0
    assert bench.wait_timer.pop_seconds() == 0
    release, patchify = threading.Event(), bench.prefetcher._patchify

    def blocked(data: bytes, grid: tuple[int, int, int]) -> np.ndarray:
        release.wait(LIMIT)
        return patchify(data, grid)

    monkeypatch.setattr(bench.prefetcher, "_patchify", blocked)
    row, _ = bench.schedule(second), bench.schedule(third)
    try:
        with pytest.raises(
            ImagePreparationError, match=r"ticket 7, .* within 0 s by 1 threads \(trainer.image_workers\)"
        ):
            row()
    finally:
        release.set()
    assert bench.wait_timer.pop_seconds() >= 0.3
    assert bench.wait_timer.pop_seconds() == 0
