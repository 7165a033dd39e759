"""Values that the CPU's kernels move: separate ones in float32, each of which reads its inputs and writes its output.

`ModelShape.traffic` counts what a card moves. On the CPU a norm is seven kernels, with seventeen in its backward pass.
Counts are for dense Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.placement.performance.shapes import MicrobatchShape, ModelShape

BYTES = 4  # of a value


@dataclass(frozen=True)
class Moved:
    """Values read or written in a forward and in its backward pass."""

    forward: float
    backward: float

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> Moved:
        return Moved(self.forward * times, self.backward * times)

    @property
    def bytes(self) -> float:
        """Bytes of both passes."""
        return BYTES * (self.forward + self.backward)


# Of each value of the width that the module works on.
RMS_NORM = Moved(7, 24)  # square, mean, two products; backward: both paths to the input and the sum of each weight
LAYER_NORM = Moved(2, 3)  # one kernel in each pass
RESIDUAL = Moved(3, 3)
ROTARY = Moved(5, 5)  # of each half a product and a sum of products
VISION_ROTARY = Moved(10, 14)  # of transformers: products with cosine and sine, halves swapped by copies
SWIGLU = Moved(5, 11)  # SiLU and a product; backward: both again, and the gradients of both halves
GELU = Moved(2, 3)
COPY = Moved(2, 2)
BIAS = Moved(0, 1)  # added by the product; its gradient is a sum
SCATTERED = Moved(2, 0)  # a tensor copied before some of its rows change


def text_traffic(model: ModelShape, shape: MicrobatchShape) -> float:
    """Bytes of the text model's layers and of its last norm, attention aside, in both passes."""
    text, image_tokens = model.text, shape.patches / model.merge
    query, key, hidden = text.query_width, text.key_width, text.hidden_size
    layer = (RMS_NORM + RESIDUAL) * (2 * hidden) + SWIGLU * text.intermediate_size
    layer += (RMS_NORM + ROTARY) * (query + key) + COPY * (query + key)  # queries, keys and values are parts of one
    layer += Moved(2, 0) * key  # values, copied out of it
    each_token = layer * model.layers + RMS_NORM * hidden + SCATTERED * ((1 + model.deepstack) * hidden)
    each_image_token = COPY * ((1 + model.deepstack) * hidden)  # features added to image tokens
    return shape.tokens * each_token.bytes + image_tokens * each_image_token.bytes


def vision_traffic(model: ModelShape, shape: MicrobatchShape) -> float:
    """Bytes of the vision tower, attention aside, in both passes."""
    hidden, wide = model.vision_hidden, model.vision_intermediate
    block = (LAYER_NORM + RESIDUAL) * (2 * hidden) + VISION_ROTARY * (2 * hidden) + GELU * wide
    block += BIAS * (5 * hidden + wide) + Moved(0, 12) * hidden  # gradients of queries, keys, values put together
    merger = (LAYER_NORM + GELU + BIAS * 2) * hidden  # of as many values: one row for the patches of a token
    # Four rows of the table of positions for each patch, with a weight each, and their sum.
    positions = Moved(4 + 8 + 5 + 3, 8 + 5) * hidden
    return shape.patches * (block * model.vision_layers + merger * (1 + model.deepstack) + positions).bytes
