"""Two gloo processes that train mixtures of experts: computed together, one after the other, and as Megatron does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import gloo
from tests.model import tiny

SIZES = {"replicas": {}, "expert": {"expert": 2}, "expert_tensor": {"tensor": 2, "expert_tensor": 2}}
KERNELS = ("auto", "sequential", "megatron")  # the last one: sequential, with Megatron's own dispatcher


def run(rank: int, folder: str) -> None:
    """Write the results of each layout and kernel to SIZES-KERNEL-RANK.pt."""
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    for name, sizes in SIZES.items():
        process_groups.init_process_groups(ParallelSizes(**sizes), seed=1)
        for kernel in KERNELS:
            torch.save(_train(Path(folder) / "moe", kernel, platform), f"{folder}/{name}-{kernel}-{rank}.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _train(folder: Path, kernel: Any, platform: Any) -> dict[str, Any]:
    """Logits, gradients and weights after a step of this rank; how often weights were stacked, and copied for it."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_webrl.config.trainer import OptimizerConfig
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.vision_language import experts, layers
    from megatron_webrl.model.vision_language.experts import TokenDispatcher
    from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

    own = kernel != "megatron"
    options = ComputeOptions(experts=kernel if own else "sequential")
    with mock.patch.object(layers, "TokenDispatcher", TokenDispatcher if own else MoEAlltoAllTokenDispatcher):
        [model] = build_model(folder, dtype="float32", platform=platform, options=options)
    load_hf([model], folder)
    wrapped = wrap_ddp([model])
    optimizer = make_optimizer(wrapped, OptimizerConfig(implementation="torch", learning_rate=0.01), 1, torch.float32)
    packed, targets = tiny.pack(list(tiny.samples().values()))
    copied: list[bool] = []  # of each time that the weights of all experts were stacked
    stack = experts._stacked

    def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = stack(weights)
        copied.append(whole.data_ptr() != weights[0].data_ptr())
        return whole

    def loss(_: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        row = logits[torch.arange(len(targets)), targets % logits.shape[1]]
        return (row * tiny.token_weights(len(targets))).sum(), {"logits": logits.detach()}

    with mock.patch.object(experts, "_stacked", stacked):
        [result] = schedule.forward_backward(wrapped, [packed], loss, forward_only=False)
    found: dict[str, Any] = {"stacked": len(copied), "copies": sum(copied), "logits": result["logits"]}
    found["gradients"] = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found
