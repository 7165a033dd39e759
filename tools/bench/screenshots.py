"""Screenshots of synthetic pages, drawn without a browser."""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

WORDS = (
    "account address basket blue book cancel cart check city clear click close colour compare date delete "
    "details email find first flight form green hotel last list login mail menu message month name next "
    "night number offer open order page password pay phone pick plane price red remove reply room save "
    "score search select send size small sort start step stop street submit table text ticket total train "
    "travel user view week window year"
)
BACKGROUND, INK = (250, 250, 252), (32, 36, 44)
COLOURS = ((38, 99, 235), (22, 148, 90), (208, 60, 60), (120, 80, 200), (230, 150, 30))


def draw_page(seed: int, width: int, height: int) -> bytes:
    """A page with a header, lines of text and buttons, as PNG of width x height pixels."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, 22), fill=rng.choice(COLOURS))
    for y in range(32, height - 12, 26):
        if rng.random() < 0.7:
            draw.text((8, y), random_words(rng, max(2, width // 56)), fill=INK)
        else:
            left = rng.randint(8, max(8, width // 2))
            draw.rectangle((left, y, left + 76, y + 21), fill=rng.choice(COLOURS))
            draw.text((left + 8, y + 5), random_words(rng, 1), fill=BACKGROUND)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def random_words(rng: random.Random, count: int) -> str:
    """`count` words, drawn with replacement."""
    return " ".join(rng.choices(WORDS.split(), k=count))
