"""Small random Qwen3.5 models and samples for them."""

from __future__ import annotations

from functools import partial

from tests.model import tiny
from tests.model.tiny import FULL, LINEAR, QWEN3_5_LAYERS, configuration

__all__ = ["FULL", "LINEAR", "MODELS", "Shape", "configuration", "samples"]

Shape = partial(tiny.Shape, layers=QWEN3_5_LAYERS)
MODELS = {
    "dense": Shape(),
    "dense-tied": Shape(tie=True, layers=(LINEAR, LINEAR, LINEAR, FULL, LINEAR), value_heads=2),
    "sparse": Shape(experts=4),
}


def samples() -> dict[str, tiny.Sample]:
    """Text only, one image, three images, and an image in a sample of several chunks of the delta rule."""
    return {**tiny.samples(), "long": tiny.make_sample([[1, 4, 6]], text=150, response=13, seed=4)}
