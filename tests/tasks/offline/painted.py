"""Screenshots with a bar code, painted without a browser."""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image

from megatron_webrl.tasks.sites.websites import CELL_PIXELS, COLUMNS, ROWS, BarCode, draw_bar_code


def painted(code: BarCode, width: int, height: int) -> bytes:
    """A noisy page of JPEG quality 80 with the bar code as its SVG says."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    left, top = width - COLUMNS * CELL_PIXELS, height - ROWS * CELL_PIXELS
    noise[top:, left:] = 255
    for x, y in re.findall(r"M(\d+) (\d+)h1v1h-1z", draw_bar_code(code)):
        row, column = top + int(y) * CELL_PIXELS, left + int(x) * CELL_PIXELS
        noise[row : row + CELL_PIXELS, column : column + CELL_PIXELS] = 0
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=80)
    return file.getvalue()
