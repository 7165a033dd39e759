"""Memory of the trainer ranks, in host and GPU."""

from __future__ import annotations

import resource

import torch

from megatron_webrl.track.process_memory import private_gib
from megatron_webrl.trainer.parallel import all_reduce_max


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Of the rank that has most; `device` is the platform's. The peak of the GPU begins again. Collective."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics = {
        "memory/trainer_gib": all_reduce_max(private_gib(), device),
        "memory/trainer_peak_gib": all_reduce_max(peak_bytes / 2**30, device),
    }
    if device.type == "cuda":
        gpu_bytes = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        metrics["memory/trainer_gpu_gib"] = all_reduce_max(gpu_bytes / 2**30, device)
    return metrics
