"""Pixels of the rows to come, made ahead by worker processes: a row asks for them when its forward pass begins."""

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

from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.images.image_workers import ImageJob, ImageWorkerPool
from megatron_webrl.trainer.images.shm_allocator import SharedMemoryAllocator, aligned_size

IMAGE_TIMEOUT_SECONDS = 120.0
"""Limit for one image."""
NEVER = 2**62
Grid = tuple[int, int, int]


class ImagePreparationError(ValueError):
    """An image cannot be prepared. The message is one line and names the episode that it is of."""


class WaitTimer:
    """Seconds that the learner waited for pixels."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """What happens within is waiting."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - begun

    def pop_seconds(self) -> float:
        """Those since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _ImageState(Enum):
    WAITING = "not begun"
    UNDERWAY = "with a worker"
    READY = "its patches lie in the arena"
    FAILED = "it cannot be cut"


@dataclass(eq=False)
class _Image:
    data: bytes
    grid: Grid
    name: str  # of the episode
    size: int  # bytes of its patches
    uses: int = 0  # passes of rows to come
    state: _ImageState = _ImageState.WAITING
    offset: int = 0  # of its block: patches, then, until they are made, the encoded image
    job: int = -1  # number of the latest one
    trouble: str = ""

    @property
    def block(self) -> int:
        """Bytes that it takes in the arena while a worker has it."""
        return aligned_size(self.size) + aligned_size(len(self.data))


class PrefetchedPixels:
    """The pixels of one row. Called: float32 [patches, dim] on the rows' device, made ahead if all went well."""

    def __init__(self, preparation: ImagePrefetcher, images: Sequence[_Image], passes: int) -> None:
        self.images, self.passes, self._preparation = images, passes, preparation

    def __call__(self) -> torch.Tensor:
        """Waits for them if need be. Raises PixelError."""
        return self._preparation.resolve(self)


class ImagePrefetcher:
    """Cuts the images of rows ahead of their use, in the order of use, as far as the memory reaches.

    Life: `row` for each row of an update, in the order in which they are computed; each is then called as often as was
    said there. Several passes repeat that order. An image of several rows is cut once, and once again only if it had to
    make room for one that is needed sooner. What no pass needs any more is freed. `ahead` tells of images that will be
    in rows.

    Workers write bytes, an eighth of what the numbers take; these are made of them on the rows' device.
    """

    def __init__(
        self,
        processor: Processor,
        pool: ImageWorkerPool,
        arena: SharedMemoryAllocator,
        device: torch.device,
        waiting: WaitTimer,
        seconds: float = IMAGE_TIMEOUT_SECONDS,
    ) -> None:
        """`seconds`: the limit of waiting for one image."""
        self.processor, self.device, self.wait_timer = processor, device, waiting
        self._pool, self._arena, self._seconds, self._cut = pool, arena, seconds, processor.patchifier
        self._dim = processor.pixels([])[0].shape[1]
        self._images: dict[bytes, _Image] = {}  # each image once
        self._order: deque[PrefetchedPixels] = deque()  # one entry a row, the next pass first
        self._underway: dict[int, _Image] = {}  # by number of job
        self._numbers = count()

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that hold images."""
        return self._arena.used_bytes

    def schedule(
        self, images: Sequence[tuple[bytes, Grid]], names: Mapping[bytes, str], passes: int
    ) -> PrefetchedPixels:
        """Announce a row of `passes` passes and begin with its images. `names` says of each whose it is."""
        wanted = []
        for data, grid in images:
            image = self._image(data, grid, names[data])
            image.uses += passes
            wanted.append(image)
        made = PrefetchedPixels(self, wanted, passes)
        self._order.append(made)
        self._work_ahead()
        return made

    def prefetch(self, images: Iterable[tuple[bytes, Grid]], name: str) -> None:
        """Begin with images of rows that are yet to be announced, as long as there is room."""
        self._collect()
        for data, grid in images:
            if data not in self._images:
                image = _Image(data, grid, name, self._cut.image_bytes(grid))
                if self._pool.full or not self._begin(image):
                    return
                self._images[data] = image

    def resolve(self, row: PrefetchedPixels) -> torch.Tensor:
        """The pixels of a row, which is the next one unless the order was another than announced."""
        patches = [image.size // self._cut.patch_bytes for image in row.images]
        pixels = torch.empty(sum(patches), self._dim, device=self.device)
        for image, part in zip(row.images, pixels.split(patches), strict=True):
            cut = torch.from_numpy(self._ready(image)).to(self.device)
            self.processor.normalize_patches(cut, part)
            self._used(image)
        if row in self._order:
            self._order.remove(row)
        row.passes -= 1
        if row.passes > 0:
            self._order.append(row)
        self._work_ahead()
        return pixels

    def close(self) -> None:
        """End the workers and let go of the memory."""
        self._pool.close()
        self._arena.close()

    def _image(self, data: bytes, grid: Grid, name: str) -> _Image:
        if data not in self._images:
            self._images[data] = _Image(data, grid, name, self._cut.image_bytes(grid))
        return self._images[data]

    def _ready(self, image: _Image) -> np.ndarray:
        """The patches of an image, uint8, waiting for them if need be."""
        self._collect()
        if image.state is not _ImageState.READY:
            with self.wait_timer.measure():
                self._wait(image)
        return self._arena.view(image.offset, image.size)

    def _wait(self, image: _Image) -> None:
        deadline = time.monotonic() + self._seconds
        while image.state is not _ImageState.READY:
            if image.state is _ImageState.FAILED:
                raise ImagePreparationError(f"a screenshot of {image.name} cannot be trained on: {image.trouble}")
            if image.state is _ImageState.WAITING and not self._make_room(image, -1) and not self._underway:
                raise ImagePreparationError(
                    f"a screenshot of {image.name} takes {image.block / 2**20:.1f} MiB of the "
                    f"{self._arena.size / 2**20:.1f} MiB of trainer.image_buffer_mib; raise it"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise ImagePreparationError(
                    f"a screenshot of {image.name} ({len(image.data)} bytes) was not prepared within "
                    f"{self._seconds:.0f} s; waited for {self._pool.describe_job(image.job)}"
                )
            self._pool.wait(min(left, 1.0))
            self._collect()

    def _used(self, image: _Image) -> None:
        """One pass less needs the image; after the last one it is forgotten."""
        image.uses -= 1
        if image.uses <= 0:
            self._free(image)
            self._images.pop(image.data, None)

    def _work_ahead(self) -> None:
        """Begin with images in the order of rows, as far as there is room for them."""
        self._collect()
        for place, row in enumerate(self._order):
            for image in row.images:
                if image.state is _ImageState.WAITING and not self._make_room(image, place):
                    return

    def _make_room(self, image: _Image, place: int) -> bool:
        """Begin with an image of the row at `place`, for which images of later rows may have to go."""
        if self._pool.full:
            return False
        while not self._begin(image):
            victim, when = self._latest()
            if victim is None or when <= place:
                return False
            self._free(victim)
        return True

    def _latest(self) -> tuple[_Image | None, int]:
        """The prepared image that is needed last, and the place of the row that needs it."""
        needed: dict[_Image, int] = {}
        for place, row in enumerate(self._order):
            for image in row.images:
                needed.setdefault(image, place)
        ready = [image for image in self._images.values() if image.state is _ImageState.READY]
        latest = max(ready, key=lambda image: needed.get(image, NEVER), default=None)
        return latest, -1 if latest is None else needed.get(latest, NEVER)

    def _begin(self, image: _Image) -> bool:
        """Give an image to the workers; False if there is no room for it."""
        offset = self._arena.allocate(image.block)
        if offset is None:
            return False
        source = offset + aligned_size(image.size)
        self._arena.view(source, len(image.data))[:] = np.frombuffer(image.data, np.uint8)
        job = ImageJob(next(self._numbers), source, len(image.data), offset, image.grid)
        self._pool.submit(job)
        image.offset, image.job, image.state = offset, job.job_id, _ImageState.UNDERWAY
        self._underway[job.job_id] = image
        return True

    def _collect(self) -> None:
        """Take over what the workers have finished."""
        for job, trouble in self._pool.collect():
            image = self._underway.pop(job.job_id)
            if trouble:
                image.state, image.trouble = _ImageState.FAILED, trouble
                self._arena.free(image.offset, image.block)
            else:
                image.state = _ImageState.READY
                self._arena.free(job.image_offset, len(image.data))

    def _free(self, image: _Image) -> None:
        """Give its memory back. It has to be cut again before it is needed next."""
        if image.state is _ImageState.READY:
            image.state = _ImageState.WAITING
            self._arena.free(image.offset, image.size)
