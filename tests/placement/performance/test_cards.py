"""Cards by the names that drivers give them."""

from __future__ import annotations

import pytest

from megatron_webrl.placement.hardware import CARDS, find_card


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", None),  # slower than the SXM form
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA L40S", None),
    ],
)
def test_a_devices_name_leads_to_its_card(device: str, card: str | None) -> None:
    found = find_card(device)
    assert (found.name if found else None) == card


def test_the_rates_of_a_card_have_their_order() -> None:
    for card in CARDS.values():
        bytes_per_second = 1e12 * card.peak_tflops / 1e9
        assert bytes_per_second > card.memory_gb_per_second > card.nvlink_gb_per_second > card.network_gb_per_second > 0
