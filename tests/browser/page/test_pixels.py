"""Comparison of screenshots by pixels."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from megatron_webrl.browser.page.observer import pixels_differ


def encoded(image: Image.Image, encoding: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, encoding, **options)
    return buffer.getvalue()


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


def test_equal_pixels_in_different_bytes_do_not_differ() -> None:
    small, large = (encoded(gradient(), "PNG", compress_level=level) for level in (9, 0))
    assert not pixels_differ(small, large)
    progressive, plain = (encoded(gradient(), "JPEG", quality=80, progressive=kind) for kind in (True, False))
    assert not pixels_differ(progressive, plain)


@pytest.mark.parametrize("encoding", ["PNG", "JPEG", "WEBP"])
def test_a_change_of_one_corner_is_seen(encoding: str) -> None:
    before, changed = gradient(), gradient()
    changed.paste((255, 0, 0), (60, 44, 64, 48))
    assert pixels_differ(*(encoded(image, encoding, quality=80) for image in (changed, before)))


def test_another_size_differs() -> None:
    black = [Image.new("RGB", size) for size in ((64, 48), (48, 64))]
    assert pixels_differ(*(encoded(image, "PNG") for image in black))
