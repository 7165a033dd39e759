"""Prepares the pixels of upcoming micro-batches in threads, ahead of the forward passes that need them.

Pillow, NumPy and torch release the interpreter's lock while they decode, resize and copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch

from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.processor import Processor
from megatron_webrl.track.timeline import OFF, Timeline

IMAGE_TIMEOUT_SECONDS = 120.0  # limit for one image
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


@dataclass(eq=False)
class _Image:
    data: bytes
    grid: Grid
    episode: str  # for errors
    patch_bytes: int
    uses: int = 0  # started passes of micro-batches that need it
    patches: Future[np.ndarray] | None = None  # uint8 [patch_bytes]; None: not started, or freed

    @property
    def buffer_bytes(self) -> int:
        """Bytes that it occupies from its start until it is freed: the copy that a thread decodes, and the patches."""
        return self.patch_bytes + len(self.data)


@dataclass(eq=False)
class _Pass:
    """One pass of a micro-batch."""

    images: Sequence[_Image]
    started: int = 0  # number of its first images that are started for it


class PrefetchedPixels:
    """The pixels of one micro-batch. A call returns float32 [patches, dim] on the prefetcher's device."""

    def __init__(self, prefetcher: ImagePrefetcher, images: Sequence[_Image], passes: int) -> None:
        self.images, self.passes, self._prefetcher = images, passes, prefetcher
        self.next_pass = _Pass(images)

    def __call__(self) -> torch.Tensor:
        """Waits for the pixels if they are not ready. Raises ImagePreparationError."""
        return self._prefetcher.resolve(self)


class ImagePrefetcher:
    """Decodes and patchifies the images of micro-batches in the order of use, as memory permits.

    Life cycle: `schedule` each micro-batch of an update, in the order of computation; then call its PrefetchedPixels
    `passes` times, in the same order. An image is freed once no started pass needs it: those of several passes are
    prepared once, if there is room for all between. Threads write uint8, an eighth of the size of the float32 patches,
    which are made on the device.
    """

    def __init__(
        self,
        processor: Processor,
        device: torch.device,
        threads: int,
        buffer_bytes: int,
        wait_timer: WaitTimer,
        timeout_seconds: float = IMAGE_TIMEOUT_SECONDS,
    ) -> None:
        """`buffer_bytes` limits the images that are started and not freed; one that is waited for may exceed it."""
        self.processor, self.device, self.wait_timer = processor, device, wait_timer
        self.threads, self.buffer_bytes, self.used_bytes = threads, buffer_bytes, 0
        self.started_images = 0  # so far
        self._timeout_seconds, self._patchifier = timeout_seconds, processor.patchifier
        self._dim = processor.pixels([])[0].shape[1]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pixels")
        self._images: WeakValueDictionary[bytes, _Image] = WeakValueDictionary()  # each image of a micro-batch once
        self._order: deque[_Pass] = deque()  # the next pass of each micro-batch

    def schedule(
        self, images: Sequence[tuple[bytes, Grid]], episodes: Mapping[bytes, str], passes: int
    ) -> PrefetchedPixels:
        """Add a micro-batch of `passes` passes and start its images. `episodes`: the episode name of each image."""
        wanted = []
        for data, grid in images:
            image = self._images.get(data)
            if image is None:
                image = _Image(data, grid, episodes[data], self._patchifier.image_bytes(grid))
                self._images[data] = image
            wanted.append(image)
        pixels = PrefetchedPixels(self, wanted, passes)
        self._order.append(pixels.next_pass)
        self._work_ahead()
        return pixels

    def resolve(self, pixels: PrefetchedPixels) -> torch.Tensor:
        """The pixels of a micro-batch: normally the next one of the order, but any is allowed."""
        patch_counts = [image.patch_bytes // self._patchifier.patch_bytes for image in pixels.images]
        result = torch.empty(sum(patch_counts), self._dim, device=self.device)
        this_pass, pixels.next_pass = pixels.next_pass, _Pass(pixels.images)
        pixels.passes -= 1
        if pixels.passes > 0:
            self._order.append(pixels.next_pass)
        for number, (image, part) in enumerate(zip(pixels.images, result.split(patch_counts), strict=True)):
            if number == this_pass.started:
                self._start(image, this_pass)
            patches = copy_to_device(torch.from_numpy(self._patches(image)), self.device)
            self.processor.normalize_patches(patches, part)
            self._work_ahead()  # before it is freed: the next pass may need it
            image.uses -= 1
            if not image.uses:  # one that is used again is prepared again
                image.patches = None
                self.used_bytes -= image.buffer_bytes
        if this_pass in self._order:
            self._order.remove(this_pass)
        self._work_ahead()
        return result

    def close(self) -> None:
        """Stop the threads, each after the image that it decodes."""
        self._pool.shutdown(cancel_futures=True)

    def _patchify(self, data: bytes, grid: Grid) -> np.ndarray:
        patches = np.empty(self._patchifier.image_bytes(grid), np.uint8)
        self._patchifier.patchify(data, grid, patches)
        return patches

    def _patches(self, image: _Image) -> np.ndarray:
        """The patches of an image, uint8; waits if they are not ready."""
        assert image.patches is not None
        if not image.patches.done():
            with self.wait_timer.measure():
                wait([image.patches], self._timeout_seconds)
        if not image.patches.done():
            raise ImagePreparationError(
                f"a screenshot of {image.episode} ({len(image.data)} bytes) was not prepared within "
                f"{self._timeout_seconds:.0f} s by {self.threads} threads (trainer.image_workers)"
            )
        try:
            return image.patches.result()
        except Exception as error:  # decoders raise many types on damaged images
            reason = str(error) or type(error).__name__
            raise ImagePreparationError(f"a screenshot of {image.episode} cannot be trained on: {reason}") from error

    def _work_ahead(self) -> None:
        """Start images in the order of use, while there is room."""
        for each in self._order:
            for image in each.images[each.started :]:
                if image.patches is None and self.used_bytes + image.buffer_bytes > self.buffer_bytes:
                    return
                self._start(image, each)

    def _start(self, image: _Image, user: _Pass) -> None:
        """Start the next image of a pass: give it to the threads unless it is started for another pass."""
        user.started += 1
        image.uses += 1
        if image.patches is None:
            self.used_bytes += image.buffer_bytes
            self.started_images += 1
            image.patches = self._pool.submit(self._patchify, bytes(image.data), image.grid)
