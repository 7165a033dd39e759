"""Keys of screenshots, and trajectories that hold keys in place of their screenshots.

A stripped trajectory is a valid trajectory and a valid record: counting, selection and planning need no screenshots,
so ranks on other nodes get it. Only a rank that makes pixels looks up the keys. Equal screenshots have equal keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace

from megatron_webrl.ring.record import Buffer
from megatron_webrl.types import Trajectory

_KEY = struct.Struct("<Q16s")  # bytes of the screenshot, BLAKE2b of them
IMAGE_KEY_BYTES = _KEY.size


def image_key(image: Buffer) -> bytes:
    """The key of an encoded screenshot."""
    return _KEY.pack(len(image), hashlib.blake2b(image, digest_size=16).digest())


def image_size(key: bytes) -> int:
    """Bytes of the screenshot with this key."""
    return int(_KEY.unpack(key)[0])


def strip_images(trajectory: Trajectory) -> Trajectory:
    """The trajectory with keys in place of its screenshots."""
    return replace(trajectory, images=tuple(map(image_key, trajectory.images)))


def restore_images(stripped: Trajectory, get_image: Callable[[bytes], bytes]) -> Trajectory:
    """The trajectory with its screenshots in place of their keys."""
    return replace(stripped, images=tuple(get_image(bytes(key)) for key in stripped.images))
