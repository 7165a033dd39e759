"""Speed of a training update: tokens, operations, and the share of the cards' peak that they are."""

from __future__ import annotations

import torch

from megatron_webrl.placement.performance.cards import find_card


def performance_metrics(
    tokens: float, operations: float, seconds: float, ranks: int, peak_tflops: float | None
) -> dict[str, float]:
    """Metrics by MLflow name. `operations`: useful ones of all ranks; `peak_tflops`: of a rank, None if not known."""
    tflops = operations / seconds / ranks / 1e12
    metrics = {
        "performance/tokens_per_second_per_gpu": tokens / seconds / ranks,
        "performance/tflops_per_gpu": tflops,
    }
    return metrics if peak_tflops is None else metrics | {"performance/mfu": tflops / peak_tflops}


def known_peak_tflops(device: torch.device, dtype: str) -> float | None:
    """The peak of this rank's card in `dtype`, TFLOP/s; None on the CPU, for other cards and in float32."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    card = find_card(torch.cuda.get_device_name(device))
    return None if card is None else card.peak_tflops
