"""Cards, the rates that their kernels reach, and kernels that run alone.

Values that the CPU's kernels move: separate ones in float32, each of which reads its inputs and writes its output.

`ModelShape.traffic` counts what a card moves. On the CPU a norm is seven kernels, with seventeen in its backward pass.
Counts are for dense Qwen3-VL.

Rates at which a device computes and moves data, as shares of a card's peaks.

The shares are assumptions for Hopper with the kernels that this trainer uses, not measured with it. Those of products
and memory are usual for large shapes; tests/placement/performance compares what follows with published measurements.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron_webrl.placement.performance.shapes import MicrobatchShape, ModelShape


@dataclass(frozen=True)
class Card:
    """A GPU in a node of eight, each with a network card of its own. 1 GB is 1e9 bytes; links are one direction."""

    name: str
    peak_tflops: float  # dense products in bfloat16, without sparsity
    memory_gb_per_second: float
    nvlink_gb_per_second: float  # to the other GPUs of the node
    network_gb_per_second: float  # to other nodes


CARDS = {
    card.name: card
    for card in (
        # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s both ways; DGX A100: 8 x 200 Gb/s.
        Card("A100", 312.0, 2039.0, 300.0, 25.0),
        # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 900 GB/s both ways; DGX H100: 8 x
        # 400 Gb/s.
        Card("H100", 989.0, 3350.0, 450.0, 50.0),
        # NVIDIA H200 SXM data sheet: 1,979 TFLOP/s with sparsity, 4.8 TB/s, the rest as H100.
        Card("H200", 989.0, 4800.0, 450.0, 50.0),
        # NVIDIA GH200 data sheet: 1,979 TFLOP/s with sparsity, 4 TB/s (HBM3), NVLink 900 GB/s both ways.
        Card("GH200", 989.0, 4000.0, 450.0, 50.0),
        # NVIDIA DGX B200 data sheet, an eighth: 4.5 PFLOP/s with sparsity, 8 TB/s, NVLink 1.8 TB/s both ways, 400 Gb/s.
        Card("B200", 2250.0, 8000.0, 900.0, 50.0),
    )
}
OTHER_FORMS = ("PCIe", "NVL")  # of H100 and H200: slower, with other links


def find_card(device_name: str) -> Card | None:
    """The card that a device's name means, such as "NVIDIA H100 80GB HBM3"; None if it has no entry."""
    if any(form in device_name for form in OTHER_FORMS):
        return None
    return next((card for name, card in CARDS.items() if re.search(rf"\b{name}\b", device_name)), None)


PRODUCT_SHARE = 0.65  # of the peak: products of thousands of rows in bfloat16
ATTENTION_SHARE = 0.35  # of the peak: FlashAttention 2, which torch's varlen_attn calls, causal
VISION_ATTENTION_SHARE = 0.25  # of the peak: heads of 72 values, padded to 96 or 128
GROUPED_SHARE = 0.50  # of the peak: grouped products with many rows for each expert
GROUPED_HALF_ROWS = 64  # rows for each expert at which grouped products reach half of that
PREFILL_SHARE = 0.55  # of the peak: an engine computes prompts
FLOAT32_SHARE = 0.04  # of the peak: products in float32 without tensor cores, 6 to 7 % of it at most; 3.6 % on B200
MEMORY_SHARE = 0.80  # of the memory's bandwidth
LINK_SHARE = 0.75  # of NVLink and network: NCCL with messages of megabytes
COLLECTIVE_SECONDS = 20e-6  # of any collective: launch and synchronisation
CHUNK_SECONDS = 40e-6  # of a chunk of each sequence in the delta rule: some ten small kernels in turn; assumed
HOST_GB_PER_SECOND = 20.0  # from a GPU to the memory of its host


@dataclass(frozen=True)
class Rates:
    """Rates of one device: operations per second, bytes per second, seconds."""

    products: float
    attention: float
    vision_attention: float
    grouped: float  # grouped products of experts with many rows each
    prefill: float
    memory: float
    nvlink: float
    network: float
    collective_seconds: float
    host: float  # bytes per second to the host's memory
    float32: float
    chunk_seconds: float  # of one chunk of the delta rule in a forward pass
    grouped_half_rows: float = GROUPED_HALF_ROWS

    @classmethod
    def of_card(cls, card: Card) -> Rates:
        """The rates of a card, with the shares of this module."""
        peak, gb = 1e12 * card.peak_tflops, 1e9
        return cls(
            products=PRODUCT_SHARE * peak,
            attention=ATTENTION_SHARE * peak,
            vision_attention=VISION_ATTENTION_SHARE * peak,
            grouped=GROUPED_SHARE * peak,
            prefill=PREFILL_SHARE * peak,
            memory=MEMORY_SHARE * gb * card.memory_gb_per_second,
            nvlink=LINK_SHARE * gb * card.nvlink_gb_per_second,
            network=LINK_SHARE * gb * card.network_gb_per_second,
            collective_seconds=COLLECTIVE_SECONDS,
            host=gb * HOST_GB_PER_SECOND,
            float32=FLOAT32_SHARE * peak,
            chunk_seconds=CHUNK_SECONDS,
        )

    @classmethod
    def of_processor(cls, products: float, attention: float, memory: float) -> Rates:
        """A CPU that computes alone, from measured rates; nothing travels, and experts compute as other products do."""
        return cls(
            products, attention, attention, products, products, memory, math.inf, math.inf, 0.0, math.inf, products,
            0.0, 0.0,
        )  # fmt: skip

    def grouped_products(self, rows: float) -> float:
        """Operations per second of grouped products with `rows` for each expert."""
        return self.grouped * rows / (rows + self.grouped_half_rows)

    def link(self, ranks: int, gpus_per_node: int) -> float:
        """Bytes per second of a group of neighbouring ranks, NVLink inside a node and the network beyond it."""
        return self.nvlink if ranks <= max(1, gpus_per_node) else self.network


def gathered_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends when `ranks` gather, or reduce and scatter, `size` bytes in all, in a ring."""
    return size * (ranks - 1) / ranks


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
