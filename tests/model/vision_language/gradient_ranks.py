"""One gloo process that computes gradients of small models with and without buffers of DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import gloo
from tests.model import tiny

SHAPES = {
    "tied": tiny.Shape(tie=True, layers=2),
    "untied": tiny.Shape(layers=2),
    "experts": tiny.Shape(layers=2, experts=4, dense_layers=(1,)),
}
CASES = [
    *((shape, "float32", recompute, "auto") for shape in SHAPES for recompute in ("none", "selective", "full")),
    ("untied", "bfloat16", "full", "auto"),
    ("experts", "bfloat16", "none", "auto"),
    ("experts", "float32", "none", "sequential"),
]
"""Shape, dtype, recomputation, and how experts are computed."""


def run(rank: int, folder: str) -> None:
    """Write the gradients of each case, by autograd alone and in buffers, to found.pt."""
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes())
    found = {case: [_gradients(Path(folder), case, platform, wrapped) for wrapped in (False, True)] for case in CASES}
    torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def _gradients(folder: Path, case: Any, platform: Any, wrapped: bool) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of two micro-batches, of which the last has no image."""
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.trainer.optimizer import wrap_ddp

    shape, dtype, recompute, experts = case
    options = ComputeOptions(recompute=recompute, experts=experts)
    [model] = build_model(folder / shape, dtype=dtype, platform=platform, options=options)
    load_hf([model], folder / shape)
    chunks: list[Any] = wrap_ddp([model]) if wrapped else [model.train()]
    samples = tiny.samples()
    packed = [tiny.pack([samples[name] for name in names]) for names in (("image", "images"), ("text",))]

    def loss(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        targets = packed[index][1]
        row = logits.float().log_softmax(dim=1)[torch.arange(len(targets)), targets]
        return (row * tiny.token_weights(len(targets))).sum(), {}

    if wrapped:
        chunks[0].zero_grad_buffer()
    schedule.forward_backward(chunks, [replace(row) for row, _ in packed], loss, forward_only=False)
    return {name: p.main_grad if wrapped else p.grad for name, p in model.named_parameters()}
