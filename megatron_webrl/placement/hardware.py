"""Cards, and the rates at which they compute and move data, as shares of their peaks.

The shares of the trainer's products, attention and kernels are those of passes on an H200 (docs/benchmarks.md), the
others assumptions for Hopper; tests/placement compares what follows with that and with published measurements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


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


PEAK_SHARES = {
    "products": 0.75,  # of thousands of rows in bfloat16
    "attention": 0.24,  # FlashAttention 2, which torch's varlen_attn calls, causal
    "vision_attention": 0.32,  # heads of 72 values, padded to 96 or 128
    "grouped": 0.39,  # grouped products with many rows for each expert
    "prefill": 0.55,  # an engine computes prompts
    "float32": 0.04,  # products without tensor cores, 6 to 7 % at most; 3.6 % on B200
}
GROUPED_HALF_ROWS = 64  # rows for each expert at which grouped products reach half of their rate
MEMORY_SHARE = 0.80  # of the memory's bandwidth
KERNEL_SHARE = 0.30  # of it, for a layer's norms, residuals, rotary embeddings and activation functions
LINK_SHARE = 0.75  # of NVLink and network: NCCL with messages of megabytes
COLLECTIVE_SECONDS = 20e-6  # of any collective: launch and synchronisation
CHUNK_SECONDS = 40e-6  # of a chunk of each sequence in the delta rule: some ten small kernels in turn; assumed
HOST_GB_PER_SECOND = 20.0  # from a GPU to the memory of its host
PINNED_GB_PER_SECOND = 40.0  # either way, where that is pinned; 55 with one GPU (docs/benchmarks.md), eight share it


@dataclass(frozen=True)
class Rates:
    """Rates of one device: operations per second, bytes per second, seconds."""

    peak: float  # products, of the data sheet
    products: float
    attention: float
    vision_attention: float
    grouped: float  # grouped products of experts with many rows each
    prefill: float
    memory: float
    kernels: float  # bytes per second of a layer's kernels that are no products
    nvlink: float
    network: float
    host: float  # bytes per second to the host's memory
    pinned: float  # either way, where it is pinned
    float32: float
    collective_seconds: float = COLLECTIVE_SECONDS
    chunk_seconds: float = CHUNK_SECONDS  # of one chunk of the delta rule in a forward pass
    grouped_half_rows: float = GROUPED_HALF_ROWS

    @classmethod
    def of_card(cls, card: Card) -> Rates:
        """The rates of a card, with the shares of this module."""
        peak, gb = 1e12 * card.peak_tflops, 1e9
        return cls(
            peak=peak,
            memory=MEMORY_SHARE * gb * card.memory_gb_per_second,
            kernels=KERNEL_SHARE * gb * card.memory_gb_per_second,
            nvlink=LINK_SHARE * gb * card.nvlink_gb_per_second,
            network=LINK_SHARE * gb * card.network_gb_per_second,
            host=gb * HOST_GB_PER_SECOND,
            pinned=gb * PINNED_GB_PER_SECOND,
            **{name: share * peak for name, share in PEAK_SHARES.items()},
        )

    def grouped_products(self, rows: float) -> float:
        """Operations per second of grouped products with `rows` for each expert."""
        return self.grouped * rows / (rows + self.grouped_half_rows)

    def link(self, ranks: int, gpus_per_node: int) -> float:
        """Bytes per second between two ranks of a group of neighbours: over the network if it spans nodes."""
        return self.nvlink if ranks <= max(1, gpus_per_node) else self.network

    def ring(self, ranks: int, gpus_per_node: int, stride: int = 1) -> float:
        """Bytes per second of each rank of a ring, whose ranks on a node use the network cards of all of them.

        `stride`: ranks from one to the next.
        """
        neighbours = max(1, gpus_per_node // stride)
        return self.nvlink if ranks <= neighbours else min(self.nvlink, neighbours * self.network)

    def exchange(self, ranks: int, gpus_per_node: int, stride: int = 1) -> float:
        """Bytes per second that each rank sends to all others, `stride` apart: NVLink for those of its node."""
        inside = min(1.0, (max(1, gpus_per_node // stride) - 1) / (ranks - 1))
        return 1 / max(inside / self.nvlink, (1 - inside) / self.network)


def gathered_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends when `ranks` gather, or reduce and scatter, `size` bytes in all, in a ring."""
    return size * (ranks - 1) / ranks
