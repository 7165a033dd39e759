"""Comparing screenshots."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def pixels_differ(first: bytes, second: bytes) -> bool:
    """Whether two encoded screenshots show different pixels. Raises OSError for bytes that are no image."""
    if first == second:
        return False
    with Image.open(io.BytesIO(first)) as left, Image.open(io.BytesIO(second)) as right:
        return left.size != right.size or not np.array_equal(
            np.asarray(left.convert("RGB")), np.asarray(right.convert("RGB"))
        )
