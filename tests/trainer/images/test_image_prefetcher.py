"""Prefetched pixels: bit-identical to the processor's, in bounded memory, despite worker crashes."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.patchifier import Patchifier
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.flops import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.images.image_prefetcher import (
    ImagePrefetcher,
    ImagePreparationError,
    PrefetchedPixels,
    WaitTimer,
)
from megatron_webrl.trainer.images.image_workers import (
    MAX_CONSECUTIVE_CRASHES,
    ImageJob,
    ImageWorkerError,
    ImageWorkerPool,
)
from megatron_webrl.trainer.images.shm_allocator import ALIGNMENT, SharedMemoryAllocator, aligned_size
from megatron_webrl.util.child_process import is_alive, start_time
from tests.trainer.growing_prompts import episode
from tests.trajectories import screenshot
from tests.waiting import until

LIMIT = 120.0
SIDE = 64
BLOCK = aligned_size(SIDE * SIDE * 3) + aligned_size(len(screenshot(0, SIDE, SIDE)) + 64)
"""Bytes that one screenshot takes while a worker has it."""


class CountingPool(ImageWorkerPool):
    """Counts the submitted images."""

    submitted = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, job: ImageJob) -> None:
        super().submit(job)
        self.submitted += 1


class Bench:
    """A prefetcher with its pool and memory."""

    def __init__(self, processor: Processor, folder: Path, workers: int, size: int, seconds: float = LIMIT) -> None:
        self.processor, self.wait_timer, self.allocator = processor, WaitTimer(), SharedMemoryAllocator(size)
        self.pool = CountingPool(workers, self.allocator, processor.patchifier, folder / "pixels.log")
        device = torch.device("cpu")
        self.prefetcher = ImagePrefetcher(processor, self.pool, self.allocator, device, self.wait_timer, seconds)

    def schedule(self, *images: bytes, passes: int = 1) -> PrefetchedPixels:
        grids = [(t, h, w) for t, h, w in self.processor.grids(images).tolist()]
        episodes = {image: f"ticket 7, episode {index}" for index, image in enumerate(images)}
        return self.prefetcher.schedule(list(zip(images, grids, strict=True)), episodes, passes)


Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest.fixture
def make(processor: Processor, tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(workers: int = 1, blocks: int = 64, seconds: float = LIMIT) -> Bench:
        made.append(Bench(processor, tmp_path, workers, blocks * BLOCK, seconds))
        return made[-1]

    yield bench
    for one in made:
        for pid in one.pool.pids:
            os.kill(pid, signal.SIGCONT)
        one.prefetcher.close()


def shots(count: int, first: int = 0) -> list[bytes]:
    return [screenshot(first + place, SIDE, SIDE) for place in range(count)]


def encoded(width: int, height: int, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(screenshot(width, width, height))).save(buffer, kind)
    return buffer.getvalue()


def killed(pid: int) -> None:
    """Kill a child and leave it unreaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


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
    assert bench.pool.submitted == len(pictures)  # each once, whatever the number of rows and passes
    assert bench.allocator.used_bytes == 0


def test_microbatches_are_equal_with_and_without_workers(make: Make, tiny_model: Path) -> None:
    bench, cost = make(), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    samples = [*episode(bench.processor, 0, (4, 3, 2)), *episode(bench.processor, 1, (4,), images=3)]
    for rank in range(2):
        plain, ahead = (
            SequencePacker(
                bench.processor,
                64,
                torch.device("cpu"),
                0,
                1,
                cost,
                image_rank=rank,
                num_image_ranks=2,
                prefetcher=made,
            ).build(samples, "constant", 10)
            for made in (None, bench.prefetcher)
        )
        assert len(plain) == len(ahead) > 1
        for one, other in zip(plain, ahead, strict=True):
            assert torch.equal(one.inputs.load_pixels(), other.inputs.load_pixels())
            assert torch.equal(one.inputs.tokens, other.inputs.tokens)
    assert bench.allocator.used_bytes == 0


def test_only_a_packer_that_encodes_all_images_prefetches(make: Make) -> None:
    bench, cost = make(), FlopsEstimator(1, 1, 1, 1, 1)
    samples = episode(bench.processor, 0, (4, 3, 2))
    for replicas in (2, 1):
        assert bench.pool.submitted == 0
        builder = SequencePacker(
            bench.processor, 400, torch.device("cpu"), 0, replicas, cost, prefetcher=bench.prefetcher
        )
        builder.prefetch(samples)
    assert bench.pool.submitted == 4
    (batch,) = builder.build(samples, "constant", 10)
    assert torch.equal(batch.inputs.load_pixels(), bench.processor.pixels(samples[-1].images)[0])
    assert bench.pool.submitted == 4


def test_images_wait_for_room_and_those_needed_last_are_freed(make: Make) -> None:
    bench, pictures = make(blocks=3), shots(8)
    rows = [[pictures[i], pictures[(i + 1) % 8]] for i in range(8)]
    made = [bench.schedule(*images, passes=3) for images in rows]
    assert 0 < bench.pool.pending_jobs <= bench.pool.submitted <= 3
    for _ in range(3):
        for pixels, images in zip(made, rows, strict=True):
            assert torch.equal(pixels(), bench.processor.pixels(images)[0])
            assert bench.allocator.used_bytes <= bench.allocator.size
    assert bench.allocator.used_bytes == 0
    assert bench.pool.submitted < 3 * 8 + 3  # some of each pass were kept for the next one


def test_pixels_may_be_used_in_another_order_and_more_often_than_scheduled(make: Make) -> None:
    bench, pictures = make(blocks=3), shots(5)
    made = [bench.schedule(picture) for picture in pictures]
    for place in (4, 0, 2, 2, 1, 3, 4):
        assert torch.equal(made[place](), bench.processor.pixels([pictures[place]])[0])
    assert bench.allocator.used_bytes == 0


def test_prefetched_images_are_cut_before_scheduling_and_make_room_for_others(make: Make) -> None:
    bench, pictures, others = make(blocks=3), shots(3), shots(3, first=10)
    (grid,) = bench.processor.grids(pictures[:1]).tolist()
    bench.prefetcher.prefetch([(picture, tuple(grid)) for picture in pictures], "ticket 7, episode 0")
    assert bench.pool.submitted == 3
    assert torch.equal(bench.schedule(*pictures[:2])(), bench.processor.pixels(pictures[:2])[0])
    assert bench.pool.submitted == 3
    assert torch.equal(bench.schedule(*others)(), bench.processor.pixels(others)[0])
    assert bench.pool.submitted == 6


def test_more_images_than_fit_into_a_workers_queue_are_cut(make: Make) -> None:
    bench, pictures = make(blocks=4000), shots(40)
    (pid,) = bench.pool.pids
    os.kill(pid, signal.SIGSTOP)
    many = [picture + bytes([n % 256, n // 256]) for n in range(1600) for picture in pictures[n % 40 : n % 40 + 1]]
    row = bench.schedule(*many)
    assert bench.pool.full
    os.kill(pid, signal.SIGCONT)
    expected = bench.processor.pixels(pictures)[0].split(16)
    for place, pixels in enumerate(row().split(16)):
        assert torch.equal(pixels, expected[place % 40])
    assert bench.pool.submitted == 1600
    assert bench.allocator.used_bytes == 0


def test_the_jobs_of_a_killed_worker_are_repeated(make: Make) -> None:
    bench, pictures = make(), shots(4)
    (pid,) = bench.pool.pids
    os.kill(pid, signal.SIGSTOP)
    row = bench.schedule(*pictures)
    killed(pid)
    assert torch.equal(row(), bench.processor.pixels(pictures)[0])
    assert bench.pool.pids != [pid]


def test_an_image_that_crashes_two_workers_fails_alone(make: Make) -> None:
    bench, (picture,) = make(), shots(1)
    source, target = bench.allocator.allocate(len(picture)), bench.allocator.allocate(SIDE * SIDE * 3)
    assert source is not None
    assert target is not None
    bench.allocator.view(source, len(picture))[:] = np.frombuffer(picture, np.uint8)
    grid = (1, 4, 4)
    bench.pool.submit(
        ImageJob(0, source, len(picture), bench.allocator.size, grid)
    )  # beyond the memory: a worker crashes
    bench.pool.submit(ImageJob(1, source, len(picture), target, grid))
    found: dict[int, str] = {}

    def finished() -> bool:
        bench.pool.wait(1.0)
        found.update({job.job_id: trouble for job, trouble in bench.pool.collect()})
        return len(found) == 2

    until(finished, "a finished preparation")
    assert found == {0: "2 worker processes crashed while decoding it; the last one exited with code 1", 1: ""}


def test_a_worker_that_keeps_crashing_is_an_error_with_its_last_log_line(processor: Processor, tmp_path: Path) -> None:
    allocator = SharedMemoryAllocator(4 * BLOCK)
    os.close(allocator.fd)
    allocator.fd = os.open(os.devnull, os.O_RDWR)  # no memory to map
    pool = ImageWorkerPool(1, allocator, processor.patchifier, tmp_path / "pixels.log")

    def collected() -> bool:
        pool.wait(1.0)
        return not list(pool.collect()) and False

    with pytest.raises(
        ImageWorkerError,
        match=f"image worker 0 crashed {MAX_CONSECUTIVE_CRASHES} times in a row; .*exited with code 1.*Error",
    ):
        until(collected, "a working worker")
    allocator.close()


def test_an_image_that_cannot_be_decoded_is_named(make: Make) -> None:
    bench, (whole,) = make(), shots(1)
    row = bench.schedule(whole, screenshot(1, SIDE, SIDE)[:-2000])
    with pytest.raises(
        ImagePreparationError, match=r"a screenshot of ticket 7, episode 1 cannot be trained on: .*truncated or dam"
    ):
        row()
    (sample,) = episode(bench.processor, 3, (4,), images=1)
    broken = type(sample)(**vars(sample) | {"images": (b"no image",)})
    builder = SequencePacker(bench.processor, 400, torch.device("cpu"), 0, 1, FlopsEstimator(1, 1, 1, 1, 1))
    with pytest.raises(ImagePreparationError, match=r"ticket 3, episode 0 .*are no PNG, JPEG or WebP"):
        builder.build([sample, broken], "constant", 10)


def test_an_image_larger_than_the_buffer_is_refused(make: Make) -> None:
    row = make(blocks=1).schedule(screenshot(0, 2 * SIDE, SIDE))
    with pytest.raises(
        ImagePreparationError, match=r"takes 0\.\d MiB, but the image buffer has 0\.\d MiB; raise rollout.max_model_len"
    ):
        row()


def test_waiting_is_measured_and_a_timeout_names_the_worker(make: Make) -> None:
    bench, (first, second) = make(seconds=0.6), shots(2)
    row, (pid,) = bench.schedule(first), bench.pool.pids
    bench.pool.wait(LIMIT)
    assert row().numel() > 0
    assert bench.wait_timer.pop_seconds() == 0
    os.kill(pid, signal.SIGSTOP)
    row = bench.schedule(second)
    with pytest.raises(
        ImagePreparationError, match=rf"ticket 7, .* within 1 s; waited for image worker 0 \(pid {pid}, 1 images"
    ):
        row()
    assert bench.wait_timer.pop_seconds() >= 0.6
    assert bench.wait_timer.pop_seconds() == 0


PARENT = """
import sys
from pathlib import Path
from megatron_webrl.model.patchifier import Patchifier
from megatron_webrl.trainer.images.shm_allocator import SharedMemoryAllocator
from megatron_webrl.trainer.images.image_workers import ImageWorkerPool
pool = ImageWorkerPool(2, SharedMemoryAllocator(2**20), Patchifier(16, 2), Path(sys.argv[1]))
print(*(worker.process.pid for worker in pool._workers), flush=True)
sys.stdin.read()
"""


def test_workers_and_their_memory_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "pixels.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [(int(pid), start_time(int(pid))) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        for pid, _ in workers:
            until(
                lambda pid=pid: "webrl-pixels (deleted)" in Path(f"/proc/{pid}/maps").read_text(), "the unlinked pixels"
            )
        parent.kill()
        until(lambda: not any(is_alive(pid, started) for pid, started in workers), "dead workers")
    assert not list(Path("/dev/shm").glob("*pixels*"))


def test_a_worker_needs_neither_torch_nor_transformers() -> None:
    code = "import megatron_webrl.trainer.images.image_worker, sys; print({'torch', 'transformers'} & set(sys.modules))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert made.stdout.strip() == "set()"


def test_blocks_never_overlap_and_all_memory_is_freed() -> None:
    allocator, chance, blocks = SharedMemoryAllocator(2**16), random.Random(0), {}
    for _ in range(3000):
        size = chance.randint(1, 9000)
        if (offset := allocator.allocate(size)) is not None:
            assert offset % ALIGNMENT == 0
            assert all(offset + size <= start or start + length <= offset for start, length in blocks.items())
            blocks[offset] = size
        else:
            given = chance.choice(sorted(blocks))
            size = blocks.pop(given)
            kept = aligned_size(size // 2)
            allocator.free(given + kept, size - kept)  # the end alone, then the rest
            allocator.free(given, kept)
    assert allocator.used_bytes == sum(map(aligned_size, blocks.values()))
    for given, size in blocks.items():
        allocator.free(given, size)
    assert allocator.used_bytes == 0
    assert allocator.allocate(2**16) == 0
    allocator.close()


def test_the_patchifier_knows_its_output_size(processor: Processor) -> None:
    assert processor.patchifier == Patchifier(16, 2)
    assert processor.patchifier.image_bytes((1, 4, 6)) == 64 * 96 * 3
