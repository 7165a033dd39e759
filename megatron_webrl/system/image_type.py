"""The media type of an encoded image, from its first bytes."""

from __future__ import annotations

IMAGE_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"RIFF": "image/webp"}
"""Those of screenshots, by first bytes."""


def image_type(image: bytes) -> str | None:
    """The media type of a PNG, JPEG or WebP image; None for anything else."""
    return next((kind for head, kind in IMAGE_TYPES.items() if image.startswith(head)), None)
