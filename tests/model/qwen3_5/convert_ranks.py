"""The gloo processes of the conversion tests; the first writes the models' tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_webrl.config.trainer import OptimizerConfig
from megatron_webrl.model.layout import ParallelSizes
from tests.gloo import join
from tests.model.convert.convert_ranks import examine, step_and_save
from tests.model.qwen3_5 import small

LAYOUTS = {
    "tensor": ParallelSizes(tensor=2, expert_tensor=2),
    "pipeline": ParallelSizes(pipeline=2),
    "expert": ParallelSizes(expert=2),
}


def run(rank: int, folder: str) -> None:
    """Build every model in every layout, fill it from the folder and from each checkpoint, and save it once."""
    platform = join(rank, 2, folder)
    # Megatron is imported on the platform that is in use.
    from megatron_webrl.model import process_groups

    found = {}
    for layout, sizes in LAYOUTS.items():
        process_groups.init_process_groups(sizes)
        for name, shape in small.MODELS.items():
            if sizes.expert > 1 and not shape.experts:
                continue
            found[layout, name] = examine(Path(folder), name, layout, platform)
        process_groups.destroy_process_groups()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def train(rank: int, folder: str) -> None:
    """In one process: an optimiser step on each model, a trainer's checkpoint and its weights."""
    platform = join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.trainer.learner import Learner
    from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

    for name in small.MODELS:
        process_groups.init_process_groups(ParallelSizes(), seed=1)
        target, model = Path(folder, "trained", name), Path(folder, name)
        target.mkdir(parents=True)
        chunks = build_model(model, dtype="float32", platform=platform)
        load_hf(chunks, model)
        wrapped = wrap_ddp(chunks)
        optimizer = make_optimizer(wrapped, OptimizerConfig(), 2, torch.float32)
        learner = Learner(wrapped, chunks[0].unpadded_vocab_size, optimizer)
        torch.save(step_and_save(learner, model, target / "checkpoints"), target / "weights.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()
