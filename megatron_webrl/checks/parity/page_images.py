"""Synthetic web page screenshots drawn without a browser, deterministic by seed."""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

_VOCABULARY = (
    "account address basket blue book cancel cart check city clear click close colour compare date delete details "
    "email find first flight form green hotel last list login mail menu message month name next night number offer "
    "open order page password pay phone pick plane price red remove reply room save score search select send size "
    "small sort start step stop street submit table text ticket total train travel user view week window year"
)
VOCABULARY = _VOCABULARY.split()
BACKGROUND, INK, LINE = (250, 250, 252), (32, 36, 44), (206, 210, 218)
COLOURS = ((38, 99, 235), (22, 148, 90), (208, 60, 60), (120, 80, 200), (230, 150, 30))


def draw_page(seed: int, width: int, height: int) -> bytes:
    """A page with a header, lines of text, fields and buttons, as PNG of width x height pixels."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, 22), fill=rng.choice(COLOURS))
    draw.text((8, 5), random_words(rng, 3).title(), fill=BACKGROUND)
    y = 32
    while y < height - 12:
        kind = rng.choice(("text", "text", "text", "field", "button", "rule"))
        if kind == "text":
            draw.text((8, y), random_words(rng, max(2, width // 56)), fill=INK)
            y += 15
        elif kind == "field":
            draw.text((8, y + 4), random_words(rng, 1), fill=INK)
            draw.rectangle((84, y, min(width - 8, 84 + rng.randint(60, 200)), y + 19), outline=LINE, width=2)
            y += 28
        elif kind == "button":
            left = rng.randint(8, max(8, width // 2))
            draw.rectangle((left, y, left + 76, y + 21), fill=rng.choice(COLOURS))
            draw.text((left + 8, y + 5), random_words(rng, 1), fill=BACKGROUND)
            y += 30
        else:
            draw.line((8, y + 4, width - 8, y + 4), fill=LINE)
            y += 10
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def random_words(rng: random.Random, count: int) -> str:
    """`count` words, drawn with replacement."""
    return " ".join(rng.choices(VOCABULARY, k=count))
