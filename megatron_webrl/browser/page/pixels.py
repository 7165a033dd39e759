"""Compare screenshots by pixels and draw numbers on them, not in the page, which could detect, move or hide them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from functools import cached_property

from PIL import Image, ImageDraw, ImageFont

from megatron_webrl.types import Element

LABEL_SIZE = 12  # pixels
_COLOURS = ("#d7263d", "#1b6ca8", "#2e7d32", "#8e24aa", "#b35900", "#00707a", "#5d4037", "#3949ab")


class ScreenshotDigest:
    """An encoded screenshot with lazily computed digests of its pixels; the pixels are not kept."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def differs(self, other: ScreenshotDigest) -> bool:
        """Whether the pixels differ, not merely the bytes. Raises OSError for bytes that are not an image."""
        if self._encoded == other._encoded:
            return False
        return self._coarse != other._coarse or self._fine != other._fine

    @cached_property
    def _coarse(self) -> bytes:
        """For JPEG, the digest of the means of 8x8 blocks, a sixth of the work of a full decode; else `_fine`."""
        with Image.open(io.BytesIO(self._encoded)) as image:
            if image.format != "JPEG":
                return self._fine
            image.draft("RGB", (image.width // 8, image.height // 8))
            return _digest(image)

    @cached_property
    def _fine(self) -> bytes:
        with Image.open(io.BytesIO(self._encoded)) as image:
            return _digest(image)


def _digest(image: Image.Image) -> bytes:
    digest = hashlib.sha256(str(image.size).encode())
    digest.update((image if image.mode == "RGB" else image.convert("RGB")).tobytes())
    return digest.digest()


def draw_marks(screenshot: bytes, elements: Sequence[Element], encoding: str, quality: int) -> bytes:
    """The screenshot with a numbered box around each element, as "png", "jpeg" or "webp". Raises OSError (no image)."""
    with Image.open(io.BytesIO(screenshot)) as opened:
        image = opened.convert("RGB")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(LABEL_SIZE)
    for element in elements:
        colour = _COLOURS[element.id % len(_COLOURS)]
        x, y, width, height = element.box
        draw.rectangle((x, y, x + width - 1, y + height - 1), outline=colour, width=2)
    for element in elements:  # after all boxes, so that no box covers a number
        _label(draw, font, element, image.size)
    buffer = io.BytesIO()
    if encoding == "png":
        image.save(buffer, "PNG", compress_level=1)
    elif encoding == "webp":
        image.save(buffer, "WEBP", quality=quality, method=2)
    else:
        image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _label(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, element: Element,
    size: tuple[int, int],
) -> None:  # fmt: skip
    """Draw the number at the top left: above the box, or inside it if there is no room above."""
    text = str(element.id)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = int(right - left) + 4, int(bottom - top) + 4
    x = max(0, min(element.box[0], size[0] - width))
    y = element.box[1] - height if element.box[1] >= height else element.box[1]
    draw.rectangle((x, y, x + width - 1, y + height - 1), fill=_COLOURS[element.id % len(_COLOURS)])
    draw.text((x + 2 - left, y + 2 - top), text, fill="white", font=font)
