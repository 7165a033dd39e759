"""Rates at which a device computes and moves data, as shares of a card's peaks.

The shares are assumptions for Hopper with the kernels that this trainer uses, not measured with it. Those of products
and memory are usual for large shapes; tests/placement/performance compares what follows with published measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_webrl.placement.performance.cards import Card

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
