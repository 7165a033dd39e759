"""Rank bodies of the loss-curve tests: a model in several layouts, resuming from each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.loss import loss_config
from tests.trainer.checkpoint.small_learner import checkpoints_in, session, state_of

QWEN_LAYOUTS: dict[str, dict[str, int]] = {"tensor": {"tensor": 2}, "replicas": {}, "pipeline": {"pipeline": 2}}
CONTINUED = [
    ("tensor", "tensor"), ("tensor", "pipeline"), ("replicas", "replicas"), ("replicas", "tensor"),
    ("pipeline", "pipeline"), ("pipeline", "replicas"),
]  # fmt: skip
"""A layout, and one whose checkpoint it continues: its own, and another one's."""


def loss_curves(rank: int, folder: str, model: str) -> None:
    """The model in each layout: two updates, a checkpoint, two more; then two more from the checkpoints of CONTINUED.

    The first loss after a checkpoint is that of its weights, the second one that of its optimizer, too.
    """
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    layouts = {name: ParallelSizes(**sizes) for name, sizes in QWEN_LAYOUTS.items()}
    found: dict[Any, Any] = {}
    with session(rank, folder) as platform:
        for name, sizes in layouts.items():
            process_groups.init_process_groups(sizes, seed=1)
            learner, update = _qwen(model, sizes, platform)
            checkpoints = checkpoints_in(Path(folder, name))
            for _ in range(2):
                update()
            checkpoints.start_save(learner, state_of(2))
            found[name] = [update() for _ in range(2)]
            checkpoints.close()
            process_groups.destroy_process_groups()
        for name, sizes in layouts.items():
            process_groups.init_process_groups(sizes, seed=1)
            for other in (each for after, each in CONTINUED if after == name):
                found[name, other] = _curve_from(Path(folder, other), model, sizes, platform)
            process_groups.destroy_process_groups()
        process_groups.init_process_groups(ParallelSizes(), seed=1)
        found["rows"] = {limit: _one_step(model, platform, limit) for limit in (128, 4096)}
        process_groups.destroy_process_groups()
    torch.save(found, f"{folder}/curves-{rank}.pt")


def _curve_from(folder: Path, model: str, sizes: Any, platform: Any) -> list[tuple[float, float]]:
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    learner, update = _qwen(model, sizes, platform)
    load_learner(folder / "checkpoints" / "version-000002", learner)
    return [update() for _ in range(2)]


def _qwen(model: str, sizes: Any, platform: Any) -> tuple[Any, Any]:
    """A learner, and an update on always the same samples, which returns loss and gradient norm."""
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer
    from tests.trainer import learner_ranks

    config = learner_ranks.make_config(model)
    config.trainer.loss, config.trainer.updates = loss_config("raft"), 4
    config.trainer.epochs = config.trainer.minibatches = 1
    config.trainer.tensor_parallel, config.trainer.pipeline_parallel = sizes.tensor, sizes.pipeline
    config.trainer.data_parallel = 2 // (sizes.tensor * sizes.pipeline)
    learner, builder = learner_ranks.make_learner(config, platform), make_sequence_packer(config, platform)
    samples = learner_ranks.make_groups(config, 2)

    def once() -> tuple[float, float]:
        metrics, _ = train_batch(learner, builder, config, samples, learner_ranks.VERSION)
        return metrics["loss"], metrics["gradient_norm"]

    return learner, once


def _one_step(model: str, platform: Any, limit: int) -> dict[str, Any]:
    """One step on all samples, in rows of at most `limit` tokens."""
    from megatron_webrl.trainer.data import batching
    from megatron_webrl.trainer.loss.objective import make_objective
    from megatron_webrl.trainer.main import make_sequence_packer
    from tests.trainer import learner_ranks

    config = learner_ranks.make_config(model)
    config.trainer.data_parallel, config.trainer.tokens_per_microbatch = 2, limit
    config.trainer.loss = loss_config("raft")
    learner = learner_ranks.make_learner(config, platform)
    config.trainer.merge_prefixes = "none"
    samples = batching.make_samples(learner_ranks.make_groups(config, 8), batching.success_advantages)
    rows = make_sequence_packer(config, platform).build(samples, "token_mean", 10)
    metrics, _ = learner.train_step(rows, None, make_objective(config.trainer.loss, None))
    weights = torch.cat([p.detach().flatten() for chunk in learner.chunks for p in chunk.parameters()])
    return {"rows": len(rows), "loss": metrics["loss"], "norm": metrics["gradient_norm"], "weights": weights}
