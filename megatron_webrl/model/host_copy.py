"""Copies from the host to the device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, in order with its other work.

    From pageable memory PyTorch would wait for all of the device's earlier work.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
