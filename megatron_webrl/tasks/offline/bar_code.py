"""Bar code on the pages of offline websites: says which page a screenshot shows, and what has been done there.

A strip of 16 x 4 black and white cells of 8 x 8 pixels at the bottom right of the viewport, above everything else. It
is legible in JPEG screenshots of quality 80 and in any viewport of at least 160 x 224 pixels. 64 bits, from the top
left, row by row, white is 1:

    4 format | 32 page digest | 16 effects digest | 3 reserved, 0 | 1 access denied | 8 checksum of the other 56
"""

from __future__ import annotations

import binascii
import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from megatron_webrl.tasks.sites.markup import Html

COLUMNS, ROWS, CELL_PIXELS = 16, 4, 8
_FORMAT = 0b1010
_CRC_START = 0x5A  # not 0: plain areas of one colour must not pass
_MARGIN = 2  # pixels of a cell's edge that are not sampled
_DARK, _BRIGHT = 80, 175  # grey levels


@dataclass(frozen=True)
class BarCode:
    """The content of a bar code."""

    page: int  # `page_digest`
    effects: int  # `effects_digest`
    denied: bool = False  # the website has refused the agent


def page_digest(page: str) -> int:
    """32 bits of a page's key: host, path and query."""
    return _digest(page, 4)


def effects_digest(effects: Iterable[tuple[str, ...]]) -> int:
    """16 bits of a multiset of effects; 0 if there are none."""
    listed = sorted("\x1f".join(effect) for effect in effects)
    return (_digest("\x1e".join(listed), 2) or 1) if listed else 0


def draw_bar_code(code: BarCode) -> Html:
    """The bar code as SVG that takes no clicks and that assistive technology does not see."""
    cells = [(index % COLUMNS, index // COLUMNS) for index, bit in enumerate(_bits(code)) if not bit]
    path = "".join(f"M{x} {y}h1v1h-1z" for x, y in cells)
    width, height = COLUMNS * CELL_PIXELS, ROWS * CELL_PIXELS
    return Html(
        '<svg aria-hidden="true" style="position:fixed;right:0;bottom:0;z-index:2147483647;pointer-events:none" '
        f'width="{width}" height="{height}" viewBox="0 0 {COLUMNS} {ROWS}" shape-rendering="crispEdges">'
        f'<rect width="{COLUMNS}" height="{ROWS}" fill="#fff"/><path d="{path}" fill="#000"/></svg>'
    )


def read_bar_code(image: bytes) -> BarCode | None:
    """The bar code of an encoded screenshot in its original size; None without a legible one."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            width, height = opened.size
            box = (width - COLUMNS * CELL_PIXELS, height - ROWS * CELL_PIXELS, width, height)
            if min(box) < 0:
                return None
            pixels = np.asarray(opened.convert("L").crop(box), np.float32)
    except OSError:
        return None
    cells = pixels.reshape(ROWS, CELL_PIXELS, COLUMNS, CELL_PIXELS)[:, _MARGIN:-_MARGIN, :, _MARGIN:-_MARGIN]
    levels = cells.mean((1, 3)).ravel()
    if ((levels > _DARK) & (levels < _BRIGHT)).any():
        return None
    return _parse(int("".join("1" if level >= _BRIGHT else "0" for level in levels), 2).to_bytes(8, "big"))


def _bits(code: BarCode) -> list[int]:
    value = (((_FORMAT << 32 | code.page) << 16 | code.effects) << 4) | int(code.denied)
    content = value.to_bytes(7, "big")
    return [int(bit) for byte in (*content, _checksum(content)) for bit in f"{byte:08b}"]


def _parse(content: bytes) -> BarCode | None:
    value = int.from_bytes(content[:7], "big")
    if content[7] != _checksum(content[:7]) or value >> 52 != _FORMAT or value & 0b1110:
        return None
    return BarCode(page=(value >> 20) & 0xFFFFFFFF, effects=(value >> 4) & 0xFFFF, denied=bool(value & 1))


def _checksum(content: bytes) -> int:
    return binascii.crc_hqx(content, _CRC_START) & 0xFF


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")
