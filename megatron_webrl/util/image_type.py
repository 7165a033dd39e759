"""The media type of an encoded image, from its first bytes."""

from __future__ import annotations

import base64

IMAGE_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"RIFF": "image/webp"}
"""Those of screenshots, by first bytes."""


def image_type(image: bytes) -> str | None:
    """The media type of a PNG, JPEG or WebP image; None for anything else."""
    return next((kind for head, kind in IMAGE_TYPES.items() if image.startswith(head)), None)


def data_url(image: bytes) -> str:
    """The image as an address of the scheme data:."""
    return f"data:{image_type(image) or 'image/jpeg'};base64,{base64.b64encode(image).decode()}"
