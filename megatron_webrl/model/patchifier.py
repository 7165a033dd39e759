"""Cut screenshots into uint8 patches of the vision tower; the processor normalises them to floats later.

Imports no transformers, and torch only for an image that needs resizing: a process starts at once and takes 30 MiB.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

CHANNELS = 3


@dataclass(frozen=True)
class Patchifier:
    """Patch geometry of a model. The merge_size x merge_size patches of one token are adjacent."""

    patch_size: int  # pixels per side
    merge_size: int  # patches per side of one token

    @property
    def patch_bytes(self) -> int:
        return CHANNELS * self.patch_size**2

    def image_bytes(self, grid: tuple[int, int, int]) -> int:
        """Bytes of the patches of an image of `grid` patches (t, h, w)."""
        return grid[0] * grid[1] * grid[2] * self.patch_bytes

    def patchify(self, data: bytes | memoryview, grid: tuple[int, int, int], out: np.ndarray) -> None:
        """Decode PNG, JPEG or WebP and write its patches into `out`, uint8 [image_bytes(grid)].

        Order: patch, channel, pixel row, pixel column. Raises ValueError for bytes that are not an image.
        """
        _, rows, columns = grid
        image, merge = decode_image(data), self.merge_size
        pixels = np.asarray(image)
        if pixels.shape[:2] != (rows * self.patch_size, columns * self.patch_size):
            pixels = _resized(pixels, rows * self.patch_size, columns * self.patch_size)
        squares = (rows // merge, merge, self.patch_size, columns // merge, merge, self.patch_size, CHANNELS)
        # Target axes: token row, token column, patch row, patch column, channel, pixel row, pixel column.
        patches = pixels.reshape(squares).transpose(0, 3, 1, 4, 6, 2, 5)
        np.copyto(out.reshape(patches.shape), patches)


def decode_image(data: bytes | memoryview) -> Image.Image:
    """Decode PNG, JPEG or WebP to RGB. Raises ValueError for bytes that are not an image."""
    image = open_image(data)
    try:
        return image.convert("RGB")
    except OSError as error:
        raise ValueError(f"image of {len(data)} bytes is truncated or damaged: {error}") from error


def open_image(data: bytes | memoryview) -> Image.Image:
    """Open an image and read its header only. Raises ValueError for bytes that are not PNG, JPEG or WebP."""
    try:
        return Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{len(data)} bytes that begin with {bytes(data[:8])!r} are no PNG, JPEG or WebP") from error


def _resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize to uint8 [height, width, channels] with the kernel of the model's image processor."""
    import torch

    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    out = torch.nn.functional.interpolate(x, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
    return out[0].permute(1, 2, 0).numpy()
