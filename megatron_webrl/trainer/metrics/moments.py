"""Count, sums and extremes of values over tokens, which add up over micro-batches, ranks and passes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_MIN, _MAX = "/min", "/max"


def moments(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Scalars `name`/count, /sum, /squares, /min, /max of `values` [tokens] where `mask`, bool [tokens], holds.

    Without such tokens the minimum is inf and the maximum -inf. Waits for no device.
    """
    values = values.detach()
    chosen = torch.where(mask, values, torch.zeros_like(values))
    bound = values.new_full((1,), math.inf)  # not new_tensor, which copies from the host and waits
    return {
        f"{name}/count": mask.sum(),
        f"{name}/sum": chosen.sum(),
        f"{name}/squares": (chosen * chosen).sum(),
        f"{name}{_MIN}": torch.cat([torch.where(mask, values, bound), bound]).min(),
        f"{name}{_MAX}": torch.cat([torch.where(mask, values, -bound), -bound]).max(),
    }


def is_extreme(name: str) -> bool:
    """Whether the metric is a minimum or a maximum; all others are sums."""
    return name.endswith((_MIN, _MAX))


def is_minimum(name: str) -> bool:
    return name.endswith(_MIN)


def combine(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all `parts`, which have the same names: sums, minima and maxima by their names."""
    return {
        name: (min if is_minimum(name) else max if is_extreme(name) else sum)(part[name] for part in parts)
        for name in parts[0]
    }


def summarise(name: str, totals: Mapping[str, float]) -> dict[str, float]:
    """`name`_mean, _std (population), _min and _max from the totals of `moments`; none without tokens."""
    count = totals.get(f"{name}/count", 0.0)
    if not count:
        return {}
    mean = totals[f"{name}/sum"] / count
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(max(0.0, totals[f"{name}/squares"] / count - mean * mean)),
        f"{name}_min": totals[f"{name}{_MIN}"],
        f"{name}_max": totals[f"{name}{_MAX}"],
    }
