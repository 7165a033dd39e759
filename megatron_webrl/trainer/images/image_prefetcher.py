"""Prepares the pixels of upcoming micro-batches in worker processes, ahead of the forward passes that need them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count

import numpy as np
import torch

from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.processor import Processor
from megatron_webrl.track.timeline import OFF, Timeline
from megatron_webrl.trainer.images.image_workers import ImageJob, ImageWorkerPool
from megatron_webrl.trainer.images.shm_allocator import SharedMemoryAllocator, aligned_size

IMAGE_TIMEOUT_SECONDS = 120.0  # limit for one image
NEVER = 2**62
Grid = tuple[int, int, int]


class ImagePreparationError(ValueError):
    """An image cannot be prepared. The message is one line and names the episode."""


class WaitTimer:
    """Seconds that the learner waited for pixels."""

    def __init__(self, timeline: Timeline = OFF) -> None:
        self._seconds, self._timeline = 0.0, timeline

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time of the block as waiting."""
        span = self._timeline.span("wait for images")
        try:
            with span:
                yield
        finally:
            self._seconds += span.seconds

    def pop_seconds(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _ImageState(Enum):
    PENDING = "not given to a worker"
    IN_PROGRESS = "given to a worker"
    READY = "its patches are in shared memory"
    FAILED = "it cannot be cut"


@dataclass(eq=False)
class _Image:
    data: bytes
    grid: Grid
    episode: str  # for errors
    size: int  # bytes of its patches
    uses: int = 0  # upcoming passes of micro-batches that need it
    state: _ImageState = _ImageState.PENDING
    offset: int = 0  # offset of its block: patches, followed by the encoded image until they are made
    job_id: int = -1  # its latest job
    error: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes that it occupies while a worker has it."""
        return aligned_size(self.size) + aligned_size(len(self.data))


class PrefetchedPixels:
    """The pixels of one micro-batch. A call returns float32 [patches, dim] on the prefetcher's device."""

    def __init__(self, prefetcher: ImagePrefetcher, images: Sequence[_Image], passes: int) -> None:
        self.images, self.passes, self._prefetcher = images, passes, prefetcher

    def __call__(self) -> torch.Tensor:
        """Waits for the pixels if they are not ready. Raises ImagePreparationError."""
        return self._prefetcher.resolve(self)


class ImagePrefetcher:
    """Cuts the images of micro-batches ahead of their use, in the order of use, as memory permits.

    Life cycle: `schedule` each micro-batch of an update, in the order of computation; then call its PrefetchedPixels
    `passes` times, in the same order. `prefetch` announces images of micro-batches that are not packed yet. An image of
    several micro-batches is cut once, and again only if it had to make room for one needed sooner; it is freed after
    its last pass. Workers write uint8, an eighth of the size of the float32 patches, which are made on the device.
    """

    def __init__(
        self,
        processor: Processor,
        pool: ImageWorkerPool,
        allocator: SharedMemoryAllocator,
        device: torch.device,
        wait_timer: WaitTimer,
        timeout_seconds: float = IMAGE_TIMEOUT_SECONDS,
    ) -> None:
        self.processor, self.device, self.wait_timer, self.allocator = processor, device, wait_timer, allocator
        self._pool, self._timeout_seconds, self._patchifier = pool, timeout_seconds, processor.patchifier
        self._dim = processor.pixels([])[0].shape[1]
        self._images: dict[bytes, _Image] = {}  # each image once
        self._order: deque[PrefetchedPixels] = deque()  # one entry per micro-batch, the next pass first
        self._in_progress: dict[int, _Image] = {}  # by job id
        self._job_ids = count()

    def schedule(
        self, images: Sequence[tuple[bytes, Grid]], episodes: Mapping[bytes, str], passes: int
    ) -> PrefetchedPixels:
        """Add a micro-batch of `passes` passes and start its images. `episodes`: the episode name of each image."""
        wanted = []
        for data, grid in images:
            if data not in self._images:
                self._images[data] = self._new_image(data, grid, episodes[data])
            elif not self._images[data].uses:  # prefetched for a group that may have been dropped, with its record
                image = self._images.pop(data)
                image.data = data
                self._images[data] = image
            self._images[data].uses += passes
            wanted.append(self._images[data])
        pixels = PrefetchedPixels(self, wanted, passes)
        self._order.append(pixels)
        self._work_ahead()
        return pixels

    def prefetch(self, images: Iterable[tuple[bytes, Grid]], episode: str) -> None:
        """Start images of micro-batches that are scheduled later, while there is room."""
        self._collect()
        for data, grid in images:
            if data not in self._images:
                image = self._new_image(data, grid, episode)
                if self._pool.full or not self._start(image):
                    return
                self._images[data] = image

    def resolve(self, pixels: PrefetchedPixels) -> torch.Tensor:
        """The pixels of a micro-batch: normally the next one of the order, but any is allowed."""
        patch_counts = [image.size // self._patchifier.patch_bytes for image in pixels.images]
        result = torch.empty(sum(patch_counts), self._dim, device=self.device)
        for image, part in zip(pixels.images, result.split(patch_counts), strict=True):
            patches = copy_to_device(torch.from_numpy(self._patches(image)), self.device)
            self.processor.normalize_patches(patches, part)
            self._release_use(image)
        if pixels in self._order:
            self._order.remove(pixels)
        pixels.passes -= 1
        if pixels.passes > 0:
            self._order.append(pixels)
        self._work_ahead()
        return result

    def close(self) -> None:
        """Stop the workers and close the shared memory."""
        self._pool.close()
        self.allocator.close()

    def _new_image(self, data: bytes, grid: Grid, episode: str) -> _Image:
        return _Image(data, grid, episode, self._patchifier.image_bytes(grid))

    def _patches(self, image: _Image) -> np.ndarray:
        """The patches of an image, uint8; waits if they are not ready."""
        self._collect()
        if image.state is not _ImageState.READY:
            with self.wait_timer.measure():
                self._wait(image)
        return self.allocator.view(image.offset, image.size)

    def _wait(self, image: _Image) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while image.state is not _ImageState.READY:
            if image.state is _ImageState.FAILED:
                raise ImagePreparationError(f"a screenshot of {image.episode} cannot be trained on: {image.error}")
            if image.state is _ImageState.PENDING and not self._make_room(image, -1) and not self._in_progress:
                raise ImagePreparationError(
                    f"a screenshot of {image.episode} takes {image.block_bytes / 2**20:.1f} MiB, but the image buffer "
                    f"has {self.allocator.size / 2**20:.1f} MiB; raise rollout.max_model_len, which sets its size"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise ImagePreparationError(
                    f"a screenshot of {image.episode} ({len(image.data)} bytes) was not prepared within "
                    f"{self._timeout_seconds:.0f} s; waited for {self._pool.describe_job(image.job_id)}"
                )
            self._pool.wait(min(left, 1.0))
            self._collect()

    def _release_use(self, image: _Image) -> None:
        image.uses -= 1
        if image.uses <= 0:
            self._free(image)
            self._images.pop(image.data, None)

    def _work_ahead(self) -> None:
        """Start images in the order of use, while there is room."""
        self._collect()
        for position, pixels in enumerate(self._order):
            for image in pixels.images:
                if image.state is _ImageState.PENDING and not self._make_room(image, position):
                    return

    def _make_room(self, image: _Image, position: int) -> bool:
        """Start an image of the micro-batch at `position`, freeing images of later micro-batches if necessary."""
        if self._pool.full:
            return False
        while not self._start(image):
            victim, needed_at = self._last_needed()
            if victim is None or needed_at <= position:
                return False
            self._free(victim)
        return True

    def _last_needed(self) -> tuple[_Image | None, int]:
        """The ready image that is needed last, and the position of the micro-batch that needs it."""
        needed_at: dict[_Image, int] = {}
        for position, pixels in enumerate(self._order):
            for image in pixels.images:
                needed_at.setdefault(image, position)
        ready = [image for image in self._images.values() if image.state is _ImageState.READY]
        last = max(ready, key=lambda image: needed_at.get(image, NEVER), default=None)
        return last, -1 if last is None else needed_at.get(last, NEVER)

    def _start(self, image: _Image) -> bool:
        """Give an image to the workers; False if there is no room for it."""
        offset = self.allocator.allocate(image.block_bytes)
        if offset is None:
            return False
        image_offset = offset + aligned_size(image.size)
        self.allocator.view(image_offset, len(image.data))[:] = np.frombuffer(image.data, np.uint8)
        job = ImageJob(next(self._job_ids), image_offset, len(image.data), offset, image.grid)
        self._pool.submit(job)
        image.offset, image.job_id, image.state = offset, job.job_id, _ImageState.IN_PROGRESS
        self._in_progress[job.job_id] = image
        return True

    def _collect(self) -> None:
        for job, error in self._pool.collect():
            image = self._in_progress.pop(job.job_id)
            if error:
                image.state, image.error = _ImageState.FAILED, error
                self.allocator.free(image.offset, image.block_bytes)
            else:
                image.state = _ImageState.READY
                self.allocator.free(job.image_offset, len(image.data))

    def _free(self, image: _Image) -> None:
        """Free its memory. It must be cut again before the next use."""
        if image.state is _ImageState.READY:
            image.state = _ImageState.PENDING
            self.allocator.free(image.offset, image.size)
