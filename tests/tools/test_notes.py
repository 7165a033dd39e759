"""What tools.bench.notes reads from screenshots and counts."""

from __future__ import annotations

import io

import pytest
from PIL import Image, ImageDraw

from megatron_webrl.track.episodes import TRAINING
from tools.bench.notes import COLOURS, REACH, NotedEpisode, figures_of, sign_near

SIGNS = ["red circle", "blue square", "yellow circle", "black square", "red square", "blue circle"]


def screenshot() -> bytes:
    """Six buttons in two rows, each 42 pixels wide, below an instruction in letters that are black, too."""
    picture = Image.new("RGB", (160, 210), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((5, 5), "Note the sign", fill=COLOURS["black"])
    draw.text((60, 190), "Next", fill=COLOURS["black"])
    for number, name in enumerate(SIGNS):
        colour, shape = name.split()
        x, y = 25 + 53 * (number % 3), 80 + 52 * (number // 3)
        draw.rectangle((x - 21, y - 21, x + 20, y + 20), outline=(136, 136, 136))
        box = (x - 13, y - 13, x + 13, y + 13)
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=COLOURS[colour])
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(("number", "name"), enumerate(SIGNS))
def test_the_sign_of_a_click_is_the_nearest_one_wherever_on_its_button_the_click_is(number: int, name: str) -> None:
    x, y = 25 + 53 * (number % 3), 80 + 52 * (number // 3)
    for right, down in ((0, 0), (-19, 0), (0, 19), (19, 0)):
        assert sign_near(screenshot(), x + right, y + down, REACH) == name
    assert sign_near(screenshot(), 70, 195, REACH) is None  # letters are no sign


def test_shares_count_only_episodes_that_can_tell() -> None:
    def episode(sign: str | None, first: str | None, last: str | None, pressed: str | None) -> NotedEpisode:
        return NotedEpisode("remember-sign-4-1", TRAINING, 0, sign == pressed, sign, first, last, pressed)

    red, blue = SIGNS[:2]
    noted, unnoted = episode(red, red, red, red), episode(red, blue, red, red)
    found = figures_of([noted, unnoted, episode(None, red, None, blue), episode(red, None, red, None)])
    assert [(each["share"], each["of"]) for each in found.values()] == [(2 / 4, 4), (2 / 3, 3), (1 / 3, 3), (2 / 3, 3)]
    assert figures_of([episode(None, red, red, None)])["press_is_note"] == {"share": None, "interval": None, "of": 0}
