"""Peak rates of GPUs, from the data sheets of their makers."""

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
