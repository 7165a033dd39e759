"""The bar code: what is drawn is read again from a JPEG, and nothing else is read."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image

from megatron_webrl.tasks.sites.websites import COLUMNS, ROWS, BarCode, effects_digest, page_digest, page_key_of_path
from tests.tasks.offline.painted import jpeg, painted
from tools.offline.site_truth import read_bar_code


@pytest.mark.parametrize(("width", "height"), [(160, 224), (161, 227), (1280, 767)])
def test_a_bar_code_is_read_from_a_screenshot_in_jpeg(width: int, height: int) -> None:
    rng = random.Random(width)
    for seed in range(10):
        code = BarCode(rng.getrandbits(32), rng.getrandbits(16), rng.random() < 0.5)
        assert read_bar_code(painted(code, width, height, seed)) == code


def test_pictures_without_a_bar_code_are_not_read() -> None:
    for level in (0, 20, 128, 240, 255):
        assert read_bar_code(jpeg(np.full((300, 300, 3), level, np.uint8))) is None
    rng = np.random.default_rng(0)
    cells = [rng.integers(0, 2, (ROWS, COLUMNS), np.uint8) * 255 for _ in range(500)]
    found = [read_bar_code(jpeg(np.kron(each, np.ones((8, 8), np.uint8)))) for each in cells]
    assert sum(code is not None for code in found) <= 1  # of 4 format, 3 reserved and 8 checksum bits
    assert read_bar_code(jpeg(np.zeros((20, 100, 3), np.uint8))) is None
    whole = painted(BarCode(1, 2), 320, 240)
    assert read_bar_code(whole) is not None
    with Image.open(io.BytesIO(whole)) as image:
        pixels = np.asarray(image).copy()
    pixels[-20:-4, -60:-40] = (120, 130, 125)  # covered in part
    assert [read_bar_code(damaged) for damaged in (b"", b"text", whole[:-500], jpeg(pixels))] == [None] * 4


def test_neighbouring_pages_and_effects_have_other_digests_and_spellings_of_one_the_same() -> None:
    host = "shop-1.localhost"
    paths = ["/", "/cart", "/item/100", "/item/101", "/category/bath", "/category/bath?page=2", "/search?q=kite"]
    digests = {page_digest(page_key_of_path(at, path)) for at in (host, "shop-2.localhost") for path in paths}
    assert len(digests) == 2 * len(paths)
    orders = [("order", "guest", way, f"101 x {n}") for way in ("standard", "express") for n in range(1, 9)]
    assert len({effects_digest([order]) for order in orders}) == len(orders)
    save, like = ("save", "1"), ("like", "1")
    assert effects_digest([save, like]) == effects_digest([like, save])
    assert len({effects_digest(done) for done in ([], [save], [save, save], [save, like])}) == 4
    assert effects_digest([]) == 0
    for one, other in (
        ("/category/bath", "/category/bath?page=1&sort="),
        ("/search?q=Slate+Kite", "/search?q=%20slate%20%20kite"),
        ("/x?a=1&b=2", "/x?b=2&a=1"),
    ):
        assert page_key_of_path(host, one) == page_key_of_path(host, other)
