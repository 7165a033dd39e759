"""Screenshots as the patches of the vision tower, in bytes: what is left to do makes floating-point numbers of them.

Neither torch nor transformers is imported here, so that a process that only makes patches starts at once and takes
30 MiB; torch comes in with the first image that has to be resized.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

CHANNELS = 3


@dataclass(frozen=True)
class Patchifier:
    """How a model's images are cut. The patches of a square of merge x merge, one token, lie together."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of what becomes one token

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch."""
        return CHANNELS * self.patch_size**2

    def image_bytes(self, grid: tuple[int, int, int]) -> int:
        """Bytes of the patches of an image of `grid` patches (t, h, w)."""
        return grid[0] * grid[1] * grid[2] * self.patch_bytes

    def patchify(self, data: bytes | memoryview, grid: tuple[int, int, int], out: np.ndarray) -> None:
        """Decode PNG, JPEG or WebP and cut it: uint8 [size(grid)], by patch, channel, row, column, into `out`.

        Raises ValueError for bytes that are no image.
        """
        _, rows, columns = grid
        image, merge = decode_image(data), self.merge_size
        pixels = np.asarray(image)
        if pixels.shape[:2] != (rows * self.patch_size, columns * self.patch_size):
            pixels = _resized(pixels, rows * self.patch_size, columns * self.patch_size)
        squares = (rows // merge, merge, self.patch_size, columns // merge, merge, self.patch_size, CHANNELS)
        # To: square's row, its column, patch's row in it, its column, channel, pixel's row, its column.
        cut = pixels.reshape(squares).transpose(0, 3, 1, 4, 6, 2, 5)
        np.copyto(out.reshape(cut.shape), cut)


def decode_image(data: bytes | memoryview) -> Image.Image:
    """Decode PNG, JPEG or WebP to RGB. Raises ValueError for bytes that are no image."""
    image = open_image(data)
    try:
        return image.convert("RGB")
    except OSError as error:
        raise ValueError(f"image of {len(data)} bytes is cut off or damaged: {error}") from error


def open_image(data: bytes | memoryview) -> Image.Image:
    """The image as far as its header tells. Raises ValueError for bytes that are no PNG, JPEG or WebP."""
    try:
        return Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{len(data)} bytes that begin with {bytes(data[:8])!r} are no PNG, JPEG or WebP") from error


def _resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [height, width, channels], by the kernel that the model's own image processor uses."""
    import torch

    source = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(
        source, size=(height, width), mode="bicubic", align_corners=False, antialias=True
    )
    return made[0].permute(1, 2, 0).numpy()
