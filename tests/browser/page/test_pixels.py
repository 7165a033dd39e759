"""Comparison of screenshots by pixels."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from megatron_webrl.browser.page.observer import ScreenshotDigest


def encoded(image: Image.Image, encoding: str, **options: Any) -> ScreenshotDigest:
    buffer = io.BytesIO()
    image.save(buffer, encoding, **options)
    return ScreenshotDigest(buffer.getvalue())


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


def test_equal_pixels_in_different_bytes_do_not_differ() -> None:
    small, large = (encoded(gradient(), "PNG", compress_level=level) for level in (9, 0))
    assert not small.differs(large)
    progressive, plain = (encoded(gradient(), "JPEG", quality=80, progressive=kind) for kind in (True, False))
    assert not progressive.differs(plain)


@pytest.mark.parametrize("encoding", ["PNG", "JPEG", "WEBP"])
def test_a_change_of_one_corner_is_seen(encoding: str) -> None:
    before, changed = gradient(), gradient()
    changed.paste((255, 0, 0), (60, 44, 64, 48))
    assert encoded(changed, encoding, quality=80).differs(encoded(before, encoding, quality=80))


def test_a_change_that_leaves_the_mean_of_its_block_is_seen() -> None:
    plain, checked = Image.new("RGB", (64, 48), (128, 128, 128)), Image.new("RGB", (64, 48), (128, 128, 128))
    for x in range(8):
        for y in range(8):
            light = 28 if (x + y) % 2 else 228
            checked.putpixel((x, y), (light, light, light))
    assert encoded(checked, "JPEG", quality=80).differs(encoded(plain, "JPEG", quality=80))


def test_another_size_differs() -> None:
    black = [Image.new("RGB", size) for size in ((64, 48), (48, 64))]
    assert encoded(black[0], "PNG").differs(encoded(black[1], "PNG"))
