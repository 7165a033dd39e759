"""Outlines: trajectories whose screenshots are named instead of held. What ranks on other nodes are told of an episode.

An outline is a trajectory like any other, and a record as well: whatever counts, chooses and plans takes it as it is.
Only who makes pixels looks a name up. Equal screenshots have equal names.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace

from megatron_webrl.ring.record import Buffer
from megatron_webrl.types import Trajectory

_NAME = struct.Struct("<Q16s")  # bytes of the screenshot, their BLAKE2b
IMAGE_KEY_BYTES = _NAME.size


def image_key(image: Buffer) -> bytes:
    """The name of an encoded screenshot."""
    return _NAME.pack(len(image), hashlib.blake2b(image, digest_size=16).digest())


def image_size(name: bytes) -> int:
    """Bytes of the screenshot that has this name."""
    return int(_NAME.unpack(name)[0])


def strip_images(trajectory: Trajectory) -> Trajectory:
    """The trajectory with names in place of its screenshots."""
    return replace(trajectory, images=tuple(map(image_key, trajectory.images)))


def restore_images(outlined: Trajectory, find: Callable[[bytes], bytes]) -> Trajectory:
    """The trajectory of an outline, its screenshots as `find` gives them."""
    return replace(outlined, images=tuple(find(bytes(name)) for name in outlined.images))
